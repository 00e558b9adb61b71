"""The bound that is found beside a search."""

import math
import threading
import time

from handmade import KIB
from test_solve import residual

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
        beside.wait()
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
