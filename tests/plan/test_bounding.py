"""The bound that is found beside a search."""

import math
import threading
import time

import pytest
from handmade import KIB
from test_solve import residual

from memfit.plan import bounding as module
from memfit.plan.bounding import Bounding
from memfit.plan.solve import Planner


def bounding(planner: Planner, budget_bytes: int, seconds: float) -> Bounding:
    return Bounding(planner.links, budget_bytes, kept=0, dropped=0, worst=1, end=time.monotonic() + seconds)


def test_no_plan_is_below_it() -> None:
    planner = Planner(residual(6).problem())
    floor_bytes = planner.floor_bytes()
    for share in (0.2, 0.5, 0.9):
        budget_bytes = floor_bytes + int(share * (planner.unplanned.peak_bytes - floor_bytes)) // KIB * KIB
        beside = bounding(planner, budget_bytes, 20.0).start()
        beside.wait(math.inf)
        found = Planner(planner.problem).solve(budget_bytes)
        bound_us = beside.bound_us + planner.problem.least_own_us
        assert -math.inf < bound_us <= found.expansion.extra_us + 1e-6
        if share < 0.5:
            assert bound_us > 0


def test_it_ends_when_it_is_stopped() -> None:
    planner = Planner(residual(40).problem())
    before = threading.active_count()
    beside = bounding(planner, planner.floor_bytes() + 3 * 1024 * KIB, 60.0).start()
    start = time.monotonic()
    beside.stop()
    assert time.monotonic() - start < 10
    assert threading.active_count() == before


def test_a_solver_that_does_not_come_back_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    come_back = threading.Event()

    class Stuck:
        def __init__(self, *_args: object, **_kwargs: object) -> None: ...

        def solve(self, **_kwargs: object) -> tuple[None, float]:
            come_back.wait(60)
            return None, 1.0

    monkeypatch.setattr(module, "StagedProgram", Stuck)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.1)
    beside = bounding(Planner(residual(6).problem()), 10**9, 0.1).start()
    start = time.monotonic()
    beside.wait(math.inf)
    beside.stop()
    assert time.monotonic() - start < 10
    monkeypatch.setattr(module, "_LONGEST_PATIENCE_S", 0.1)
    module.wait_until_quiet()
    come_back.set()
    assert time.monotonic() - start < 10
    beside._thread.join()
    assert "HiGHS has not ended in time" in caplog.text
    module.wait_until_quiet()  # nothing is left


def test_a_search_without_a_limit_can_wait() -> None:
    planner = Planner(residual(3).problem())
    beside = bounding(planner, planner.floor_bytes() + 1024 * KIB, math.inf).start()
    beside.wait(math.inf)
    assert not beside._thread.is_alive()
