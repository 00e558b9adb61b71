"""Three levels: a student learns from a teacher, the teacher from data with weights, the weights from clean data.

Top: weights of training samples, by the student's loss on clean samples. Middle: the teacher, on the noisy samples
with their weights. Bottom: the student, on what the teacher says about unlabelled inputs. A third of the labels
is wrong; the weights should find out which. Half a minute on a CPU.
"""

import torch
import torch.nn.functional as F
from torch import nn

from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem

torch.manual_seed(0)
torch.set_num_threads(1)  # tensors this small are slower on several
features, classes, noisy_count = 10, 3, 150
direction = torch.randn(features, classes)


def draw(count):
    inputs = torch.randn(count, features)
    return inputs, (inputs @ direction).argmax(1)


noisy_inputs, labels = draw(noisy_count)
is_wrong = torch.rand(noisy_count) < 0.33
noisy_labels = torch.where(is_wrong, torch.randint(classes, (noisy_count,)), labels)
is_wrong = noisy_labels != labels
clean, unlabelled, test = draw(60), torch.randn(600, features), draw(5000)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(noisy_count))

    def forward(self):
        return torch.sigmoid(self.scores)


class Top(ImplicitProblem):
    def training_step(self, batch):
        return F.cross_entropy(self.student(batch[0]), batch[1])


class Teacher(ImplicitProblem):
    def training_step(self, batch):
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return (self.weights() * losses).mean() + 0.01 * self.module.weight.square().sum()


class Student(ImplicitProblem):
    def training_step(self, batch):
        advice = self.teacher(batch).softmax(1)
        return F.cross_entropy(self(batch), advice) + 0.01 * self.module.weight.square().sum()


def accuracy(module):
    return float((module(test[0]).argmax(1) == test[1]).float().mean())


weigher, teacher_net, student_net = Weights(), nn.Linear(features, classes), nn.Linear(features, classes)
solver = Config(type="cg", cg_iterations=10, cg_damping=0.01, unroll_steps=5)
weights = Top("weights", None, weigher, torch.optim.Adam(weigher.parameters(), lr=0.1), None, [clean])
descent = torch.optim.SGD(teacher_net.parameters(), lr=0.5)
teacher = Teacher("teacher", solver, teacher_net, descent, None, [(noisy_inputs, noisy_labels)])
student = Student("student", solver, student_net, torch.optim.SGD(student_net.parameters(), lr=0.5), None, [unlabelled])
dependencies = {
    "u2l": {weights: [teacher], teacher: [student]},  # the teacher uses the weights, the student the teacher
    "l2u": {student: [weights]},  # the loss that the weights are learned by uses the student alone
}


class Program(Engine):
    def validation(self):
        trust = weigher().detach()
        print(
            f"step {self.global_step}: student {accuracy(student_net):.1%}, teacher {accuracy(teacher_net):.1%}; "
            f"weight of right labels {trust[~is_wrong].mean():.2f}, of wrong ones {trust[is_wrong].mean():.2f}"
        )


engine = Program([weights, teacher, student], EngineConfig(train_iters=600, valid_step=150), dependencies)
print(engine.estimate())
engine.run()
