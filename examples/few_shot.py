"""Learn to learn sine waves from ten points: implicit MAML, and MAML itself.

The upper problem owns initial parameters; the lower one adapts them to a task. Implicit MAML keeps the
adapted parameters near the initial ones by a penalty and differentiates through the solution; MAML differentiates
through the steps. About a minute on a CPU.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem, IterativeProblem

shots, inner_steps, inner_rate, penalty = 10, 5, 0.02, 0.5
meta_steps = 500
torch.set_num_threads(1)  # tensors this small are slower on several


class Tasks:
    """Sine waves of random amplitude and phase; gives support and query points of one task after the other."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.renew()

    def renew(self):
        amplitude, phase = torch.rand(2, generator=self.generator)
        self.amplitude, self.phase = 0.1 + 4.9 * amplitude, math.pi * phase

    def points(self, count):
        x = 10 * torch.rand(count, 1, generator=self.generator) - 5
        return x, self.amplitude * torch.sin(x + self.phase)


def network():
    return nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))


class Meta(ImplicitProblem):
    def get_batch(self):
        return self.adapted.tasks.points(shots)

    def training_step(self, batch):
        return F.mse_loss(self.adapted(batch[0]), batch[1])


class Adapting(ImplicitProblem):
    """Implicit MAML: near the initial parameters."""

    def __init__(self, *args):
        super().__init__(*args)
        self.tasks = Tasks(seed=1)

    def on_inner_loop_start(self):
        self.tasks.renew()
        self.support = self.tasks.points(shots)
        self.module.load_state_dict(self.meta.module.state_dict())

    def get_batch(self):
        return self.support

    def training_step(self, batch):
        pairs = zip(self.module.parameters(), self.meta.module.parameters(), strict=True)
        distance = sum((own - start).square().sum() for own, start in pairs)
        return F.mse_loss(self(batch[0]), batch[1]) + 0.5 * penalty * distance


class Stepping(IterativeProblem, Adapting):
    """MAML: through the steps, from the initial parameters on."""

    def initial_parameters(self):
        return self.meta.module.parameters()

    def training_step(self, batch):
        return F.mse_loss(self(batch[0]), batch[1])


def error_after_adapting(start):
    """Mean squared error on fresh tasks after a few plain steps from the given parameters."""
    tasks, errors = Tasks(seed=99), []
    for _ in range(100):
        tasks.renew()
        adapted = network()
        adapted.load_state_dict(start)
        optimizer = torch.optim.SGD(adapted.parameters(), lr=inner_rate)
        inputs, targets = tasks.points(shots)
        for _ in range(inner_steps):
            optimizer.zero_grad()
            F.mse_loss(adapted(inputs), targets).backward()
            optimizer.step()
        inputs, targets = tasks.points(100)
        errors.append(float(F.mse_loss(adapted(inputs), targets).detach()))
    return sum(errors) / len(errors)


variants = {
    "implicit MAML": (Adapting, Config(type="cg", cg_iterations=3, cg_damping=1.0, unroll_steps=inner_steps)),
    "MAML": (Stepping, Config(unroll_steps=inner_steps)),
    "first-order MAML": (Stepping, Config(unroll_steps=inner_steps, first_order=True)),
}
for name, (kind, config) in variants.items():
    torch.manual_seed(0)
    initial, working = network(), network()
    untrained = error_after_adapting(initial.state_dict())
    adapted = kind("adapted", config, working, torch.optim.SGD(working.parameters(), lr=inner_rate))
    meta = Meta("meta", Config(gradient_clipping=10.0), initial, torch.optim.Adam(initial.parameters(), lr=2e-3))
    engine = Engine(
        [meta, adapted],
        EngineConfig(train_iters=meta_steps * inner_steps, valid_step=10**9),
        {"u2l": {meta: [adapted]}, "l2u": {adapted: [meta]}},
    )
    engine.run()
    trained = error_after_adapting(initial.state_dict())
    print(f"{name}: error after adapting {untrained:.2f} before meta-learning, {trained:.2f} after")
