"""The budget that a refusal names is found again, however little time there is for the search."""

import dataclasses
import sys

import pytest
from test_solve import residual

from memfit.errors import InfeasibleBudget
from memfit.plan import promises
from memfit.plan.problem import Problem
from memfit.plan.promises import promise, promised
from memfit.plan.solve import Planner


def planner(**changes: float) -> Planner:
    case = residual(3)
    times = [changes.get("time_us", each) for each in case.costs.time_us]
    return Planner(Problem(case.graph, dataclasses.replace(case.costs, time_us=times)))


@pytest.fixture(autouse=True)
def nothing_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "_promised", type(promises._promised)())


def test_a_schedule_that_was_promised_begins_the_next_search(monkeypatch: pytest.MonkeyPatch) -> None:
    first = planner()
    lowest = first.smallest().expansion
    assert lowest.peak_bytes < first.unplanned.peak_bytes
    assert not promised(first)
    promise(first, [lowest])
    second = planner(time_us=5.0)
    second.found += promised(second)
    searching = sys.modules[Planner.__module__]  # the name `memfit.plan` is that of a function
    monkeypatch.setattr(searching, "greedy", lambda *_args, **_options: second.unplanned)
    with pytest.raises(InfeasibleBudget):
        planner(time_us=5.0).solve(lowest.peak_bytes, time_limit_s=0)
    found = second.solve(lowest.peak_bytes, time_limit_s=0)
    assert found.expansion.peak_bytes == lowest.peak_bytes
    assert found.expansion.extra_us != lowest.extra_us  # which is of the costs of now


def test_other_wishes_are_promised_nothing() -> None:
    first = planner()
    promise(first, [first.smallest().expansion])
    assert not promised(Planner(first.problem, kept=1))
    assert len(promised(planner())) == 1


def test_the_latest_promises_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "_MOST", 2)
    first = planner()
    wishes = [Planner(first.problem, kept=kept) for kept in range(3)]
    for each in wishes:
        promise(each, [first.unplanned])
    assert [len(promised(each)) for each in wishes] == [0, 1, 1]
