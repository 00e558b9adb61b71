"""Schedules near another one fit, run as they say and are faster."""

import math
import time

from handmade import Case, Features, trainings
from hypothesis import given, settings
from test_solve import residual
from test_windows import assert_all_run, middle_bytes

from memfit.plan.cuts import Cuts
from memfit.plan.greedy import greedy
from memfit.plan.neighbours import Neighbours
from memfit.plan.problem import numbers
from memfit.plan.solve import Planner


def neighbours_of(planner: Planner, budget_bytes: int, *, end: float = math.inf, every: int = 1) -> Neighbours:
    """With a stage for one turn in so many."""
    cuts = Cuts(links=planner.links, budget_bytes=budget_bytes, kept=0, dropped=0, horizon=1000)
    cuts.stages |= {*range(0, len(planner.problem.backward), every)}
    return Neighbours(cuts, planner.expander, end if end < math.inf else time.monotonic() + 60)


def test_a_poor_plan_becomes_nearly_as_good_as_the_search_s() -> None:
    planner = Planner(residual(6).problem())
    first_us = best_us = searched_us = 0.0
    for share in (0.3, 0.5, 0.7):
        budget_bytes = middle_bytes(planner, share)
        first = greedy(planner.problem, budget_bytes)
        *_, best = [first, *neighbours_of(planner, budget_bytes, every=3).improved(first)]
        assert best.peak_bytes <= budget_bytes
        first_us, best_us = first_us + first.extra_us, best_us + best.extra_us
        searched_us += Planner(residual(6).problem()).solve(budget_bytes).expansion.extra_us
    assert best_us <= 0.5 * first_us
    assert best_us <= 1.2 * searched_us


def test_nothing_is_tried_when_time_is_up() -> None:
    planner = Planner(residual(6).problem())
    budget_bytes = middle_bytes(planner, 0.5)
    late = neighbours_of(planner, budget_bytes, end=time.monotonic() - 1)
    assert list(late.improved(greedy(planner.problem, budget_bytes))) == []


def test_every_value_is_free_with_every_other_at_some_time() -> None:
    planner = Planner(residual(6).problem())
    values = [*numbers(planner.links.values)]
    sets = list(neighbours_of(planner, middle_bytes(planner, 0.5))._neighbourhoods())
    assert all(any(free >> one & free >> other & 1 for free in sets) for one in values for other in values)


@settings(max_examples=20, deadline=None)
@given(trainings(Features(in_place=True, alternatives=True, most_layers=6)))
def test_what_is_found_runs_as_it_says(case: Case) -> None:
    assert_all_run(case, lambda planner, budget_bytes: neighbours_of(planner, budget_bytes, every=2).improved)
