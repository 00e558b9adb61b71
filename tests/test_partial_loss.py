"""Budgets of models whose loss takes some of their outputs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.measure.peak import measure_peak


class Turned(nn.Module):
    """The gradient of its first output alone is laid out otherwise than the sum of both is, and written over."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(2):
            batch = batch + F.gelu(self.linear(self.norm(batch)))
        return batch.transpose(0, -1), batch[:1]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch)[0].square().mean()
    return loss


def fitted(budget: float | int | str) -> tuple[memfit.Plan, int]:
    torch.manual_seed(0)
    model, batch = Turned(), torch.randn(1, 4, 64, 64)
    options = {"allow": ("recompute",), "remember": False, "progress": False, "time_limit": 1}
    memfit.fit(model, batch, budget, loss=loss_of, **options)
    plan = memfit.plan_of(model)
    assert plan is not None

    def step() -> None:
        loss_of(model, batch).backward()

    step()
    model.zero_grad()
    return plan, measure_peak(step, resident=[model, batch]).peak_bytes


@pytest.mark.parametrize("budget", ["smallest", 0.8, 0.95])
def test_a_budget_holds_where_the_loss_takes_one_output_of_two(budget: float | str, one_thread: None) -> None:
    plan, measured = fitted(budget)
    assert plan.budget_bytes is not None
    assert not plan.regions
    assert measured <= plan.peak_bytes <= plan.budget_bytes


def test_the_smallest_budget_with_such_a_loss_is_one_that_is_planned_for(one_thread: None) -> None:
    with pytest.raises(memfit.InfeasibleBudget) as refusal:
        fitted(450_000)
    assert refusal.value.smallest_bytes
    plan, measured = fitted(refusal.value.smallest_bytes)
    assert measured <= plan.peak_bytes <= refusal.value.smallest_bytes
