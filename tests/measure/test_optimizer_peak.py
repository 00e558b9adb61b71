"""The predicted peak of a step with any optimizer is the measured one, once its state grows no more."""

import abc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import Case, cross_entropy, encoder
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Muon, Optimizer

import memfit
from memfit.measure.optimizer import optimizer_memory
from memfit.measure.peak import held_bytes, measure_peak

KIB = 1024
Make = Callable[[list[nn.Parameter]], Optimizer]


class ByHand(Optimizer):
    """Updates one parameter after the other."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, self.state[parameter], group["lr"])

    @abc.abstractmethod
    def update(self, parameter: nn.Parameter, state: dict[str, Any], rate: float) -> None:
        """Change one parameter."""


class ReplacingMoments(ByHand):
    """An Adam that makes its moments anew."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any], rate: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state["m"] = 0.9 * state.get("m", torch.zeros_like(parameter)) + 0.1 * gradient
        state["v"] = 0.99 * state.get("v", torch.zeros_like(parameter)) + 0.01 * gradient * gradient
        parameter.sub_(rate * state["m"] / (state["v"].sqrt() + 1e-8))


class ReplacingParameters(ByHand):
    """Puts a copy of a running average in the place of each parameter."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any], rate: float) -> None:
        average = state.get("average", parameter.detach())
        state["average"] = 0.9 * average + 0.1 * (parameter - rate * parameter.grad)  # type: ignore[operator]
        parameter.data = state["average"].clone()


class KeepingGradients(ByHand):
    """Holds the gradients of the step before, which live on when `zero_grad` drops them."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any], rate: float) -> None:
        parameter.sub_(rate * (parameter.grad + state.get("previous", 0.0)))  # type: ignore[operator]
        state["previous"] = parameter.grad


class CopyingGradients(ByHand):
    """Copies the gradients for the next step."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any], rate: float) -> None:
        if "previous" in state:
            parameter.sub_(state["previous"], alpha=rate)
        assert parameter.grad is not None
        state["previous"] = parameter.grad.clone()


class DroppingGradients(ByHand):
    """Lets go of every gradient once it was used."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any], rate: float) -> None:
        parameter.sub_(rate * parameter.grad)  # type: ignore[operator]
        parameter.grad = None


def matrices(weights: list[nn.Parameter]) -> list[nn.Parameter]:
    return [weight for weight in weights if weight.dim() == 2]


OPTIMIZERS: dict[str, Make] = {
    "Adam": Adam,
    "AdamW": AdamW,
    "AdamW, foreach": lambda weights: AdamW(weights, foreach=True),
    "AdamW, fused": lambda weights: AdamW(weights, fused=True),
    "SGD with momentum": lambda weights: SGD(weights, lr=0.01, momentum=0.9),
    "SGD": lambda weights: SGD(weights, lr=0.01),
    "Muon": lambda weights: Muon(matrices(weights)),
    "LBFGS": lambda weights: LBFGS(weights, lr=0.01, history_size=4, max_iter=3),
    "LBFGS, one iteration": lambda weights: LBFGS(weights, lr=0.01, history_size=2, max_iter=1),
    "moments are replaced": ReplacingMoments,
    "parameters are replaced": ReplacingParameters,
    "gradients are kept": KeepingGradients,
    "gradients are copied": CopyingGradients,
    "gradients are dropped": DroppingGradients,
}


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))


def vectors(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 128), torch.randint(10, (rows,))


def squares(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


STEP_IS_PEAK = {
    "perceptron": Case(model=perceptron, batch=lambda: vectors(8), loss=cross_entropy),
    "transformer": Case(model=encoder, batch=lambda: (torch.randn(1, 8, 64), torch.randn(1, 8, 64)), loss=squares),
}
PASS_IS_PEAK = Case(model=encoder, batch=lambda: (torch.randn(8, 32, 64), torch.randn(8, 32, 64)), loss=squares)


def predicted_and_measured(case: Case, make: Make) -> tuple[int, int]:
    model, batch = case.model().train(), case.batch()
    optimizer = make(list(model.parameters()))
    predicted = memfit.estimate(model, batch, optimizer=optimizer, loss=case.loss).peak_bytes

    # A gradient that grows along a step is not added to the history of LBFGS, and held beside it.
    scales = itertools.cycle([1, 3])

    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = case.loss(model, batch)
        (loss * next(scales)).backward()
        return loss

    def step() -> None:
        if isinstance(optimizer, LBFGS):
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            loss = closure()
            optimizer.step()
            del loss

    warm, steps = (6, 4) if isinstance(optimizer, LBFGS) else (3, 1)
    for _ in range(warm):
        step()
    peaks = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        peaks.append(measure_peak(step, resident=[model, optimizer, batch]).peak_bytes)
    return predicted, max(peaks)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("case", STEP_IS_PEAK.values(), ids=STEP_IS_PEAK)
def test_the_predicted_peak_is_the_measured_one(case: Case, make: Make) -> None:
    predicted, measured = predicted_and_measured(case, make)
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("name", ["AdamW", "LBFGS", "moments are replaced", "gradients are kept"])
def test_the_peak_of_a_pass_beside_the_state_is_the_measured_one(name: str) -> None:
    predicted, measured = predicted_and_measured(PASS_IS_PEAK, OPTIMIZERS[name])
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.slow
def test_a_line_search_is_counted_as_one_that_looks_between_two_points() -> None:
    case = STEP_IS_PEAK["perceptron"]
    predicted, measured = predicted_and_measured(
        case, lambda weights: LBFGS(weights, history_size=4, max_iter=3, line_search_fn="strong_wolfe")
    )
    assert measured * 0.99 <= predicted <= measured + 4 * held_bytes([case.model()])


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("lr", [1.0, 0.01, torch.tensor(0.5)], ids=["1", "0.01", "tensor"])
@pytest.mark.parametrize(("history", "iterations"), [(3, 1), (3, 8), pytest.param(30, 8, marks=pytest.mark.slow)])
def test_the_history_of_lbfgs_is_counted_full(lr: Any, history: int, iterations: int, search: str | None) -> None:
    weights = [nn.Parameter(torch.zeros(200)), nn.Parameter(torch.zeros(7, 8))]
    optimizer = LBFGS(weights, lr=lr, history_size=history, max_iter=iterations, line_search_fn=search)
    flat = optimizer_memory(optimizer, weights).state_bytes // held_bytes(weights)
    always = 2 * history + 2  # changes, steps, the direction and the gradient before
    assert always <= flat <= always + 10, "and what a step holds while it calls the closure"


def test_an_lbfgs_that_has_stepped_tells_the_same_as_a_new_one() -> None:
    weights = [nn.Parameter(torch.ones(200)), nn.Parameter(torch.ones(7, 8))]
    used = LBFGS(weights, history_size=3, max_iter=2)

    def closure() -> torch.Tensor:
        for weight in weights:
            weight.grad = weight.detach().clone()
        return torch.ones(())

    used.step(closure)  # type: ignore[arg-type]
    before = [weight.detach().clone() for weight in weights]
    new = LBFGS(weights, history_size=3, max_iter=2)
    assert optimizer_memory(used, weights) == optimizer_memory(new, weights)
    assert all(torch.equal(one, other) for one, other in zip(before, weights, strict=True))


class WantingClosure(SGD):
    """Says that it wants a closure when it has none."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise RuntimeError("a closure is needed")
        held = [parameter.grad.clone() for parameter in self.param_groups[0]["params"]]
        closure()
        super().step()
        del held


def test_what_an_optimizer_holds_while_its_closure_runs_counts_as_state() -> None:
    weights = [nn.Parameter(torch.zeros(KIB)), nn.Parameter(torch.zeros(3 * KIB))]
    memory = optimizer_memory(WantingClosure(weights, lr=0.1), weights)
    assert memory.state_bytes == pytest.approx(16 * KIB, abs=16)
    assert memory.workspace_bytes == pytest.approx(0, abs=16)


def test_the_changes_of_a_step_are_told_in_order() -> None:
    weights = [nn.Parameter(torch.zeros(KIB)), nn.Parameter(torch.zeros(3 * KIB))]
    memory = optimizer_memory(DroppingGradients, weights)
    assert memory.workspace_bytes == 8 * KIB, "4 KiB were released before 12 were needed"
    assert memory.changes_bytes == (4 * KIB, -8 * KIB, 12 * KIB, -24 * KIB)
    assert sum(memory.changes_bytes) == -16 * KIB, "all gradients"


def test_the_changes_of_a_step_that_allocates_nothing_are_none() -> None:
    assert optimizer_memory(lambda weights: SGD(weights, lr=0.1), [nn.Parameter(torch.zeros(9))]).changes_bytes == ()
