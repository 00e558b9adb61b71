"""What an update takes is found out in the room that a budget leaves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

import memfit
from memfit.measure.peak import measure_peak
from memfit.step.policy import StepPolicy
from memfit.step.update_cost import update_cost

MIB = 2**20
Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": AdamW,
    "AdamW, foreach": lambda parameters: AdamW(parameters, foreach=True),
    "SGD": lambda parameters: SGD(parameters, lr=0.1),
    "Adafactor": Adafactor,
}


def big_layer(width: int = 1024) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Linear(8, width), nn.Linear(width, width, bias=False))


def taken_bytes(run: Callable[[], Any]) -> int:
    return measure_peak(run, resident=[]).peak_bytes


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("room_bytes", [8 * MIB, MIB // 2])
@pytest.mark.parametrize("update", ["after", "inside"])
def test_updates_are_timed_in_the_room_there_is(name, room_bytes, update):
    optimizer = OPTIMIZERS[name](big_layer().parameters())
    policy = StepPolicy(update=update)
    costs = []
    assert taken_bytes(lambda: costs.append(update_cost(optimizer, policy, room_bytes))) <= room_bytes
    assert costs[0].time_us > 0


def test_updates_in_16_bits_and_in_a_tier_stay_in_the_room_too(tmp_path):
    for policy in (
        StepPolicy(precision="pure-bf16"),
        StepPolicy(state_tier="disk", directory=tmp_path),
    ):
        parameters = [nn.Parameter(torch.ones(2**20, dtype=torch.bfloat16 if policy.precision else torch.float32))]
        optimizer = AdamW(parameters)
        assert taken_bytes(lambda: update_cost(optimizer, policy, 3 * MIB)) <= 3 * MIB  # noqa: B023


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_is_told_as_with_all_the_room_there_is(name):
    optimizer = OPTIMIZERS[name](big_layer().parameters())
    for policy in (StepPolicy(), StepPolicy(update="inside")):
        free, tight = update_cost(optimizer, policy), update_cost(optimizer, policy, MIB // 2)
        assert tight.state_bytes == free.state_bytes
        assert tight.workspace_bytes == pytest.approx(free.workspace_bytes, rel=0.1)
        assert tight.workspace_bytes >= 0.99 * free.workspace_bytes
        assert free.is_timed


def test_times_of_whole_parameters_that_had_no_room_are_estimates():
    optimizer = Adafactor(big_layer().parameters())
    assert not update_cost(optimizer, StepPolicy(), MIB // 2).is_timed


@pytest.mark.parametrize(
    ("make", "budget_bytes"), [(AdamW, int(6.3 * MIB)), (lambda parameters: SGD(parameters, lr=0.1), int(2.6 * MIB))]
)
def test_the_first_step_plans_inside_its_budget(make, budget_bytes):
    torch.manual_seed(0)
    model, batch = big_layer(512), torch.randn(4, 512)
    optimizer = make(model.parameters())
    step = memfit.Step(model, optimizer, lambda model, batch: model(batch).square().mean(), budget=budget_bytes)
    assert measure_peak(lambda: step(batch), resident=[model, batch, optimizer]).peak_bytes <= budget_bytes
