"""Steps that do more at some times than at others: what is predicted is what the largest of them takes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RAdam

from memfit.measure.optimizer import optimizer_memory
from memfit.measure.peak import measure_peak

Make = Callable[[list[nn.Parameter]], Optimizer]


class EveryFifth(SGD):
    """Does more at every fifth step, which it counts by itself."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        if self.count % 5 == 0:
            for parameter in self.param_groups[0]["params"]:
                parameter.copy_(torch.stack([parameter] * 8).mean(0))


class SlowWeights(AdamW):
    """Keeps a second copy from the tenth step on."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        if self.count % 10 == 0:
            for parameter in self.param_groups[0]["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.clone())
                parameter.copy_(slow.lerp_(parameter, 0.5))


class CountedInTensors(SGD):
    """Does more at every hundredth step, which a tensor counts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
            if state["step"].item() % 100 == 0:
                parameter.copy_(torch.stack([parameter] * 8).mean(0))


class AskingFirst(SGD):
    """Does more where nothing is infinite."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if not parameter.grad.isinf().any():
                parameter.sub_(torch.stack([parameter.grad] * 4).mean(0))


class AskingForASize(SGD):
    """Works on as many elements as are positive."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            count = int((parameter.flatten()[:2] > 0).sum())
            parameter.flatten()[:count] += torch.zeros(count)


def sgd(cls: type[SGD]) -> Make:
    return lambda parameters: cls(parameters, lr=0.1)


OPTIMIZERS: dict[str, tuple[Make, int]] = {  # and the step that takes most
    "RAdam": (RAdam, 6),
    "RAdam, foreach": (lambda parameters: RAdam(parameters, foreach=True), 6),
    "every fifth step": (sgd(EveryFifth), 5),
    "slow weights": (SlowWeights, 11),
    "slow weights, in their cycle": (SlowWeights, 20),
    "every hundredth step, in tensors": (sgd(CountedInTensors), 100),
    "yes or no": (sgd(AskingFirst), 2),
    "a number that is a size": (sgd(AskingForASize), 2),
}


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(64, 32)), nn.Parameter(torch.ones(100))]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_the_largest_step_takes_is_predicted(name):
    make, largest = OPTIMIZERS[name]
    predicted = optimizer_memory(make(weights()), weights())

    parameters = weights()
    optimizer = make(parameters)
    gradients = [torch.ones_like(each) for each in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for _ in range(largest - 1):
        optimizer.step()
    taken = measure_peak(optimizer.step, resident=[optimizer]).peak_bytes
    assert predicted.state_bytes + predicted.workspace_bytes == pytest.approx(taken, abs=256)
