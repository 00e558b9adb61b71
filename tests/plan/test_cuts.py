"""Stages are cut where a schedule is over the budget."""

import pytest
from test_solve import residual
from test_windows import middle_bytes

from memfit.plan.cuts import Cuts
from memfit.plan.greedy import greedy
from memfit.plan.solve import Planner


@pytest.fixture
def planner() -> Planner:
    return Planner(residual(6).problem())


def cuts_of(planner: Planner, share: float = 0.5) -> Cuts:
    budget_bytes = middle_bytes(planner, share)
    return Cuts(links=planner.links, budget_bytes=budget_bytes, kept=0, dropped=0, horizon=100, stages={0})


def test_what_is_over_the_budget_is_cut_until_all_is_said(planner: Planner) -> None:
    cuts, over = cuts_of(planner), planner.unplanned
    assert over.peak_bytes > cuts.budget_bytes
    while cuts.cut(over):
        assert len(cuts.stages) <= len(over.peaks)
    assert max(range(len(over.peaks)), key=lambda place: over.peaks[place]) in cuts.stages
    assert not cuts.margins


def test_what_fits_is_not_cut(planner: Planner) -> None:
    cuts = cuts_of(planner)
    assert not cuts.cut(greedy(planner.problem, cuts.budget_bytes))
    assert cuts.stages == {0}


def test_margins_are_as_wide_as_what_is_over(planner: Planner) -> None:
    cuts, over = cuts_of(planner), planner.unplanned
    cuts.cut(over)
    cuts.widen_margins(over)
    assert cuts.margins == {
        place: over.peaks[place] - cuts.budget_bytes for place in cuts.stages if over.peaks[place] > cuts.budget_bytes
    }


def test_a_schedule_that_fits_is_a_start_whatever_the_margins_are(planner: Planner) -> None:
    cuts = cuts_of(planner)
    cuts.cut(planner.unplanned)
    cuts.margins |= dict.fromkeys(cuts.stages, cuts.budget_bytes)
    start = greedy(planner.problem, cuts.budget_bytes)
    answer, _ = cuts.program_near(start).solve(time_limit_s=5.0, free=0)
    assert answer is not None
    assert answer.extra_us + planner.problem.least_own_us <= start.extra_us + 1e-6


def test_a_program_is_written_anew_when_stages_or_the_start_are_others(planner: Planner) -> None:
    cuts = cuts_of(planner)
    start = greedy(planner.problem, cuts.budget_bytes)
    first = cuts.program_near(start)
    assert cuts.program_near(start) is first
    cuts.cut(planner.unplanned)
    second = cuts.program_near(start)
    assert second is not first
    assert cuts.program_near(greedy(planner.problem, cuts.budget_bytes)) is not second
