"""Windows of a schedule, planned again, fit and are no slower."""

import math
import time
from collections.abc import Callable, Iterator

from handmade import KIB, Case, Features, trainings
from hypothesis import given, settings
from test_solve import chain, residual

from memfit.plan.choice import choice_of
from memfit.plan.expand import Expansion, program_of
from memfit.plan.greedy import greedy
from memfit.plan.simulate import simulate
from memfit.plan.solve import Planner
from memfit.plan.windows import Windows


def windows_of(planner: Planner, budget_bytes: int, *, end: float = math.inf) -> Windows:
    return Windows(
        links=planner.links,
        expander=planner.expander,
        budget_bytes=budget_bytes,
        kept=planner.kept,
        dropped=planner.dropped,
        horizon=2 * len(planner.problem.forward),
        end=end if end < math.inf else time.monotonic() + 60,
    )


def middle_bytes(planner: Planner, share: float) -> int:
    floor_bytes = planner.floor_bytes()
    return floor_bytes + int(share * (planner.unplanned.peak_bytes - floor_bytes)) // KIB * KIB


def test_a_schedule_that_is_over_the_budget_is_made_to_fit() -> None:
    planner = Planner(residual(6).problem())
    budget_bytes = middle_bytes(planner, 0.5)
    stages = [0, len(planner.problem.backward) // 2]
    assert planner.unplanned.peak_bytes > budget_bytes
    fitted = windows_of(planner, budget_bytes).fitted(planner.unplanned, stages)
    assert fitted is not None
    assert fitted.peak_bytes <= budget_bytes
    assert fitted.extra_us <= greedy(planner.problem, budget_bytes).extra_us


def test_a_window_that_cannot_fit_is_not_made_up() -> None:
    planner = Planner(chain(6).problem())
    assert windows_of(planner, planner.floor_bytes() - KIB).fitted(planner.unplanned, [0]) is None


def test_nothing_is_tried_when_time_is_up() -> None:
    planner = Planner(residual(6).problem())
    budget_bytes = middle_bytes(planner, 0.5)
    late = windows_of(planner, budget_bytes, end=time.monotonic() - 1)
    assert late.fitted(planner.unplanned, [0]) is None
    assert list(late.improved(greedy(planner.problem, budget_bytes))) == []


def test_a_poor_plan_becomes_as_good_as_the_search_s() -> None:
    planner = Planner(residual(5).problem())
    budget_bytes = middle_bytes(planner, 0.4)
    first = greedy(planner.problem, budget_bytes)
    steps = list(windows_of(planner, budget_bytes).improved(first))
    best = steps[-1] if steps else first
    solution = Planner(residual(5).problem()).solve(budget_bytes)
    assert best.extra_us <= first.extra_us
    assert best.extra_us <= 1.05 * solution.expansion.extra_us + 1e-6


@settings(max_examples=25, deadline=None)
@given(trainings(Features(in_place=True, alternatives=True, most_layers=6)))
def test_what_windows_find_runs_as_they_say(case: Case) -> None:
    assert_all_run(case, lambda planner, budget_bytes: windows_of(planner, budget_bytes).improved)


def assert_all_run(case: Case, improving: Callable[[Planner, int], Callable[[Expansion], Iterator[Expansion]]]) -> None:
    """Schedules that are found one after the other are faster and faster, fit and run."""
    planner = Planner(case.problem())
    budget_bytes = middle_bytes(planner, 0.5)
    first = greedy(planner.problem, budget_bytes)
    if first.peak_bytes > budget_bytes:
        return
    previous_us = first.extra_us
    for found in improving(planner, budget_bytes)(first):
        assert found.extra_us < previous_us
        previous_us = found.extra_us
        assert_runs(case, planner, found, budget_bytes)


def assert_runs(case: Case, planner: Planner, found: Expansion, budget_bytes: int) -> None:
    program = program_of(planner.problem, found)
    timeline = simulate(case.graph, program, workspace_bytes=case.costs.workspace_bytes)
    assert timeline.peak_bytes == found.peak_bytes <= budget_bytes
    assert choice_of(planner.problem, found).wanted == found.live
