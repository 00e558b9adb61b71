"""Budgets that count what a loop keeps from one step to the next."""

import warnings

import pytest
import torch
from regional import Branching
from torch import nn

import memfit
from memfit.errors import InvalidInput
from memfit.measure.peak import measure_peak
from memfit.units import format_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

KEPT = memfit.Loop(gradients="kept")


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(192, 192), nn.GELU()) for _ in range(6)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(rows).square().mean()
        return loss


def rows(number: int = 0) -> torch.Tensor:
    return torch.randn(256, 192, generator=torch.Generator().manual_seed(number))


def gradient_bytes(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters())


def accumulated_peak_bytes(model: nn.Module, batch: torch.Tensor) -> int:
    """Of a step that begins with the gradients of the one before."""
    model(batch).backward()
    gradients = [each.grad for each in model.parameters()]
    return measure_peak(lambda: model(batch).backward(), resident=[model, batch, gradients]).peak_bytes


def test_kept_gradients_are_part_of_the_budget(recwarn):
    model, batch = Tower(), rows()
    plain = memfit.plan(model, batch, budget="smallest", progress=False)
    budget = plain.peak_bytes + gradient_bytes(model)
    memfit.fit(model, batch, budget, loop=KEPT, remember=False, progress=False)
    plan = memfit.plan_of(model)
    assert plan.external_bytes == gradient_bytes(model)
    assert accumulated_peak_bytes(model, batch) == pytest.approx(plan.peak_bytes, rel=0.002)
    assert plan.peak_bytes <= budget
    assert not [each for each in recwarn if "gradients" in str(each.message)]


def test_gradients_that_are_kept_beside_a_budget_that_does_not_count_them_are_said_once():
    model, batch = Tower(), rows()
    memfit.fit(model, batch, "smallest", remember=False, progress=False)
    model(batch).backward()
    size = format_bytes(gradient_bytes(model))
    with pytest.warns(UserWarning, match=f"take {size} beside this step, so that it is up to {size} over its budget"):
        model(batch).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch).backward()


def test_gradients_that_a_budget_has_room_for_are_not_spoken_of(recwarn):
    model, batch = Tower(), rows()
    memfit.fit(model, batch, "20MiB", remember=False, progress=False)
    for number in range(3):
        model(rows(number)).backward()
    assert not [str(each.message) for each in recwarn if "gradients" in str(each.message)]


def test_a_plan_with_kept_gradients_is_written_and_applied(tmp_path, recwarn):
    model, batch = Tower(), rows()
    plan = memfit.plan(model, batch, budget="smallest", optimizer="sgd", loop=KEPT, progress=False)
    plan.save(tmp_path / "plan.json")
    loaded = memfit.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert f"{format_bytes(gradient_bytes(model))} of that live beside the step" in str(loaded)
    memfit.apply(loaded, model, batch)
    for _ in range(2):
        model(batch).backward()
    model(batch[:128]).backward()  # another kind of call, under the same budget
    assert not [each for each in recwarn if "gradients" in str(each.message)]


def test_kept_gradients_count_in_regions():
    torch.manual_seed(0)
    model, batch = Branching(), torch.randn(16, 3, 32, 32)
    plain = memfit.plan(model, batch, budget="smallest", progress=False)
    counted = memfit.plan(model, batch, budget="smallest", loop=KEPT, progress=False)
    assert plain.regions
    assert counted.regions
    assert counted.peak_bytes == pytest.approx(plain.peak_bytes + gradient_bytes(model), rel=0.01)


def test_a_loop_of_another_kind_is_refused():
    with pytest.raises(InvalidInput, match=r"loop is a memfit\.Loop, 'kept' was given"):
        memfit.fit(Tower(), rows(), "smallest", loop="kept", progress=False)


def test_a_refused_budget_names_what_stays_beside_the_step():
    model = Tower()
    with pytest.raises(
        memfit.InfeasibleBudget, match=f"what stays beside the step {format_bytes(gradient_bytes(model))}"
    ):
        memfit.plan(model, rows(), budget="1.5MiB", loop=KEPT, progress=False)
