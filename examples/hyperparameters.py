"""Learn one penalty for each weight of a logistic regression, so that it does well on held-out data.

Eighty features of which ten matter, few training samples. The lower problem fits the regression under the
penalties, the upper one changes the penalties by the loss on held-out samples. Every method is tried; about a
minute on a CPU.
"""

import time

import torch
import torch.nn.functional as F
from torch import nn

from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem

features, useful, samples = 80, 10, 120
torch.manual_seed(0)
torch.set_num_threads(1)  # tensors this small are slower on several
truth = torch.cat([2 * torch.randn(useful), torch.zeros(features - useful)])


def draw(count):
    inputs = torch.randn(count, features)
    return inputs, (torch.sigmoid(inputs @ truth) > torch.rand(count)).float()


train, held_out, test = draw(samples), draw(samples), draw(5000)


class Penalties(nn.Module):
    def __init__(self):
        super().__init__()
        self.logarithms = nn.Parameter(torch.full((features,), -3.0))

    def forward(self):
        return self.logarithms.exp()


class Regression(ImplicitProblem):
    def training_step(self, batch):
        inputs, labels = batch
        loss = F.binary_cross_entropy_with_logits(self(inputs).squeeze(1), labels)
        return loss + 0.5 * (self.penalties() * self.module.weight.square()).sum()


class HeldOut(ImplicitProblem):
    def training_step(self, batch):
        inputs, labels = batch
        return F.binary_cross_entropy_with_logits(self.regression(inputs).squeeze(1), labels)

    def param_callback(self):
        self.module.logarithms.data.clamp_(max=0.5)  # beyond that, the lower steps would diverge


def accuracy(module):
    inputs, labels = test
    return float(((module(inputs).squeeze(1) > 0) == labels.bool()).float().mean())


plain = nn.Linear(features, 1)
descent = torch.optim.SGD(plain.parameters(), lr=0.5)
for _ in range(2000):
    descent.zero_grad()
    F.binary_cross_entropy_with_logits(plain(train[0]).squeeze(1), train[1]).backward()
    descent.step()
print(f"without penalties: test accuracy {accuracy(plain):.1%}")

methods = {
    "darts": Config(type="darts", unroll_steps=20),
    "sama": Config(type="sama", unroll_steps=20),
    "neumann": Config(type="neumann", unroll_steps=20, neumann_iterations=20, neumann_alpha=0.5),
    "cg": Config(type="cg", unroll_steps=20, cg_iterations=20),
    "nystrom": Config(type="nystrom", unroll_steps=20, nystrom_rank=20, nystrom_damping=0.05),
    "unrolled": Config(type="unrolled", unroll_steps=20, unroll_truncation=10),
}
for name, config in methods.items():
    torch.manual_seed(1)
    linear, penalty = nn.Linear(features, 1), Penalties()
    regression = Regression("regression", config, linear, torch.optim.SGD(linear.parameters(), lr=0.5), None, [train])
    optimizer = torch.optim.Adam(penalty.parameters(), lr=0.1)
    penalties = HeldOut("penalties", None, penalty, optimizer, None, [held_out])
    dependencies = {"u2l": {penalties: [regression]}, "l2u": {regression: [penalties]}}
    start = time.perf_counter()
    config = EngineConfig(train_iters=2000, valid_step=10**9)
    Engine([penalties, regression], config, dependencies).run()
    learned = penalty().detach()
    print(
        f"{name:9} test accuracy {accuracy(linear):.1%}; penalties {learned[:useful].mean():.3f} on useful features, "
        f"{learned[useful:].mean():.3f} on others; {time.perf_counter() - start:.1f} s"
    )
