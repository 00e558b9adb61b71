import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from memfit.errors import InvalidInput
from memfit.measure.optimizer import OptimizerLike, optimizer_memory
from memfit.measure.peak import held_bytes, measure_peak

NAMES = [
    "sgd",
    "adam",
    "adamw",
    "rmsprop",
    "adagrad",
    "adamax",
    "adadelta",
    "radam",
    "nadam",
    "rprop",
    "adafactor",
]

Make = Callable[[list[nn.Parameter]], Optimizer]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in ((200, 300), (300,), (64, 3, 5, 5), ())]


def two_groups(weights: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.1, "amsgrad": True}])


VARIANTS: dict[str, Make] = {
    "plain SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "Nesterov": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "foreach": lambda weights: torch.optim.AdamW(weights, foreach=True),
    "fused": lambda weights: torch.optim.AdamW(weights, fused=True),
    "amsgrad in two groups": two_groups,
    "centered RMSprop": lambda weights: torch.optim.RMSprop(weights, centered=True, momentum=0.9),
}


def by_name(name: str) -> Make:
    classes = {key.lower(): value for key, value in vars(torch.optim).items()}
    return lambda weights: classes[name](weights, **({"lr": 0.1, "momentum": 0.9} if name == "sgd" else {}))


CASES: list[tuple[OptimizerLike, Make]] = [(name, by_name(name)) for name in NAMES]
CASES += [(make, make) for make in VARIANTS.values()]


def stepped(make: Make, weights: list[nn.Parameter]) -> Optimizer:
    optimizer = make(weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("optimizer", "make"), CASES, ids=[*NAMES, *VARIANTS])
def test_the_state_is_exactly_that_of_a_real_step(optimizer: OptimizerLike, make: Make) -> None:
    real = stepped(make, parameters())
    assert optimizer_memory(optimizer, parameters()).state_bytes == held_bytes([real])


@pytest.mark.parametrize(("optimizer", "make"), CASES, ids=[*NAMES, *VARIANTS])
def test_the_workspace_is_the_rise_of_a_real_later_step(optimizer: OptimizerLike, make: Make) -> None:
    real = stepped(make, parameters())
    for _ in range(5):
        real.step()  # RAdam rectifies from the sixth step on
    rise_bytes = measure_peak(real.step, resident=[]).peak_bytes
    assert optimizer_memory(optimizer, parameters()).workspace_bytes == pytest.approx(rise_bytes, abs=1024)


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)
def test_an_instance_tells_the_same_as_its_factory(make: Make) -> None:
    weights = parameters()
    assert optimizer_memory(make(weights), weights) == optimizer_memory(make, weights)


def test_an_instance_that_has_stepped_tells_the_same_as_a_new_one() -> None:
    weights = parameters()
    used = stepped(VARIANTS["foreach"], weights)
    assert optimizer_memory(used, weights) == optimizer_memory(VARIANTS["foreach"], weights)


def test_an_instance_with_a_learning_rate_schedule_is_measured_and_not_stepped() -> None:
    weights = parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copy.deepcopy(weights)
    assert optimizer_memory(optimizer, weights) == optimizer_memory("sgd", weights)
    assert all(torch.equal(old, new) for old, new in zip(before, weights, strict=True))


def test_hooks_of_the_users_optimizer_are_not_called() -> None:
    weights = parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    optimizer.register_step_post_hook(lambda *_: calls.append(2))
    optimizer_memory(optimizer, weights)
    assert not calls


def test_a_name_may_be_written_in_capitals() -> None:
    assert optimizer_memory("AdamW", parameters()) == optimizer_memory("adamw", parameters())


def test_frozen_parameters_have_no_state() -> None:
    weights = parameters()
    weights[0].requires_grad_(False)
    assert optimizer_memory("sgd", weights).state_bytes == held_bytes(weights[1:])


def test_a_frozen_parameter_in_an_instance_has_no_state() -> None:
    weights = parameters()
    weights[0].requires_grad_(False)
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    assert optimizer_memory(optimizer, weights).state_bytes == held_bytes(weights[1:])


def test_half_precision_halves_the_state() -> None:
    half = [nn.Parameter(weight.detach().bfloat16()) for weight in parameters()]
    assert optimizer_memory("sgd", half).state_bytes * 2 == optimizer_memory("sgd", parameters()).state_bytes


def test_a_learning_rate_may_be_a_tensor() -> None:
    weights = parameters()
    optimizer = torch.optim.Adam(weights, lr=torch.tensor(0.1))
    assert optimizer_memory(optimizer, weights).state_bytes == optimizer_memory("adam", weights).state_bytes


def test_the_users_optimizer_and_parameters_are_untouched() -> None:
    weights = parameters()
    optimizer = torch.optim.AdamW(weights, amsgrad=True)
    before, groups = copy.deepcopy(weights), copy.deepcopy(optimizer.state_dict())
    optimizer_memory(optimizer, weights)
    assert not optimizer.state
    assert optimizer.state_dict() == groups
    assert optimizer.param_groups[0]["params"] == weights
    assert all(weight.grad is None for weight in weights)
    assert all(torch.equal(old, new) for old, new in zip(before, weights, strict=True))


def test_nothing_is_allocated_that_is_as_big_as_the_parameters() -> None:
    weights = [nn.Parameter(torch.zeros(1_000_000))]
    assert measure_peak(lambda: optimizer_memory("adamw", weights), resident=[]).peak_bytes < 1_000_000


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        InvalidInput,
        match=r"unknown optimizer 'adamx' \(did you mean adam.*\?\); known are .*adamw.*, or give an instance",
    ):
        optimizer_memory("adamx", parameters())


class Chatty(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise RuntimeError("first line\nsecond line")


def test_a_failure_of_several_lines_is_told_in_one_paragraph() -> None:
    with pytest.raises(InvalidInput, match="Chatty could not be stepped") as caught:
        optimizer_memory(Chatty(parameters(), lr=0.1), parameters())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [3, lambda weights: "not an optimizer"], ids=["number", "factory"])
def test_what_makes_no_optimizer_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidInput):
        optimizer_memory(wrong, parameters())  # type: ignore[arg-type]


def test_on_cuda_an_optimizer_that_was_not_told_otherwise_works_on_all_parameters_at_once() -> None:
    told = optimizer_memory(lambda weights: torch.optim.AdamW(weights, foreach=True), parameters())
    assert optimizer_memory("adamw", parameters(), for_cuda=True) == told
    assert told.workspace_bytes > 0
    assert optimizer_memory("adamw", parameters()) != told


def test_on_cuda_an_optimizer_that_was_told_otherwise_does_as_told() -> None:
    one_by_one = optimizer_memory(
        lambda weights: torch.optim.AdamW(weights, foreach=False), parameters(), for_cuda=True
    )
    fused = optimizer_memory(lambda weights: torch.optim.AdamW(weights, fused=True), parameters(), for_cuda=True)
    assert one_by_one == optimizer_memory("adamw", parameters())
    assert fused.workspace_bytes == 0


def test_parameters_without_a_gradient_have_no_state() -> None:
    weights = parameters()
    with_all = optimizer_memory("adamw", weights).state_bytes
    without_last = optimizer_memory("adamw", weights, without_gradient=weights[-1:]).state_bytes
    assert without_last == with_all - 2 * held_bytes(weights[-1:]) - 4
