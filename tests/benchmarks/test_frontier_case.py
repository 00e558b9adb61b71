import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import frontier_case
from benchmarks.frontier_case import FRACTIONS, Limits, memfit_points, part_points, relative_difference
from benchmarks.frontier_record import EAGER, EagerRun
from benchmarks.measuring import Subject
from benchmarks.models import Case
from memfit.errors import InfeasibleBudget

CASE = Case(
    name="tiny",
    batch_size=64,
    make_model=lambda: nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2)
    ),
    make_batch=lambda size: torch.randn(size, 8),
    loss=lambda model, batch: model(batch).square().mean(),
    sample=lambda batch: (batch,),
)


@dataclasses.dataclass
class FakePlan:
    peak_bytes: int
    slowdown: float = 0.05
    lower_bound: float = 0.04
    gap: float = 0.01
    plan_seconds: float = 1.0


class FakePlanner:
    """Plans that change nothing, or the weights by a little."""

    def __init__(self, *, spoil: float = 0.0) -> None:
        self.spoil = spoil
        self.calls: list[str] = []

    def plan(self, model: nn.Module, sample: Any, *, budget: int | str, time_limit: float, **options: Any) -> FakePlan:
        self.calls.append(f"plan {budget if isinstance(budget, str) else 'bytes'} {options}")
        if budget == "smallest":
            return FakePlan(peak_bytes=1)
        if len(self.calls) == 3:
            raise InfeasibleBudget("no plan fits 3 B; the smallest is 5 B")
        if len(self.calls) == 4:
            raise ValueError("odd budget")
        return FakePlan(peak_bytes=int(budget))

    def apply(self, plan: FakePlan, model: nn.Module) -> None:
        with torch.no_grad():
            model[4].bias += self.spoil

    def remove(self, model: nn.Module) -> None:
        self.calls.append("remove")


def test_the_eager_part_gives_peak_and_what_persists() -> None:
    (run,) = part_points(CASE, EAGER, Limits(pairs_s=0.0))
    assert isinstance(run, EagerRun)
    assert 0 < run.persistent_bytes < run.peak_bytes
    assert run.step_s > 0


def test_every_budget_gives_a_point_figures_or_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = FakePlanner()
    monkeypatch.setattr(frontier_case, "_planner", planner)
    points = list(memfit_points(Subject.of(CASE), Limits(pairs_s=0.0)))
    assert [point.fraction for point in points] == [*FRACTIONS, None]
    assert [point.reason for point in points if point.is_infeasible] == ["no plan fits 3 B; the smallest is 5 B"]
    assert [point.reason for point in points if point.reason and not point.is_infeasible] == ["ValueError: odd budget"]
    figures = [point.measured for point in points if point.measured is not None]
    assert all(each.differing == [] and each.largest_difference == 0.0 for each in figures)
    assert figures[-1].budget_bytes == 1
    assert planner.calls.count("remove") == len(figures)


def test_what_differs_from_eager_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier_case, "_planner", FakePlanner(spoil=1e-3))
    first = next(iter(memfit_points(Subject.of(CASE), Limits(pairs_s=0.0))))
    assert first.measured is not None
    assert first.measured.differing == ["loss", "gradients"]
    assert 1e-6 < first.measured.largest_difference < 0.1


def test_the_only_output_that_is_used_is_told_to_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = FakePlanner()
    monkeypatch.setattr(frontier_case, "_planner", planner)
    next(iter(memfit_points(Subject.of(dataclasses.replace(CASE, outputs="loss")), Limits(pairs_s=0.0))))
    assert planner.calls[0] == "plan bytes {'outputs': 'loss'}"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (None, None, 0.0),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.ones(2), None, float("inf")),
        (torch.ones(2), torch.ones(3), float("inf")),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), float("inf")),
        (torch.tensor([1]), torch.tensor([2]), float("inf")),
        (torch.zeros(2), torch.ones(2), float("inf")),
        (torch.ones(1), torch.tensor([float("nan")]), float("inf")),
        (torch.tensor([2.0]), torch.tensor([3.0]), 0.5),
    ],
)
def test_differences_are_relative_and_never_lost(one: Any, other: Any, expected: float) -> None:
    assert relative_difference([one], [other]) == expected
    assert relative_difference([one], []) == float("inf")
