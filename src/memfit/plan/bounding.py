"""A bound on all schedules, found beside the search: the staged program without a horizon, on few stages, then on more.

HiGHS works outside of the interpreter's lock, so that this takes another processor and none of the search's time.

Note [Nobody waits for ever]
    HiGHS is told when to end and looks at that now and then, seldom inside its heuristics. If it does not come back
    soon, the search ends all the same, with the bound that there is. Who measures times waits until it is gone, for it
    takes a processor, and so does the end of the process, for it calls Python.
"""

import atexit
import logging
import math
import threading
import time

from memfit.plan.links import Links
from memfit.plan.staged import StagedProgram

log = logging.getLogger(__name__)

_STAGES = (6, 12)
_GAP = 0.005
_PATIENCE_S = 0.2  # with HiGHS, after it should have ended
_LONGEST_PATIENCE_S = 20.0  # before times are measured
_LEFT: list[threading.Thread] = []  # that have not come back in time


def wait_until_quiet() -> None:
    """Wait for threads that work on after their searches."""
    end = time.monotonic() + _LONGEST_PATIENCE_S
    while _LEFT:
        thread = _LEFT.pop()
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            log.warning("HiGHS has not ended in time; it works on beside what comes now")


atexit.register(wait_until_quiet)


class Bounding:
    """What no schedule can be below, better and better until it is stopped."""

    def __init__(self, links: Links, budget_bytes: int, *, kept: int, dropped: int, worst: int, end: float) -> None:
        """`worst` is the turn of the unplanned peak; `end` is when to stop, as `time.monotonic` tells it."""
        self._links = links
        self._budget_bytes = budget_bytes
        self._kept, self._dropped = kept, dropped
        self._worst = worst
        self._end = end
        self._bound_us = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="memfit-bound")

    def start(self) -> "Bounding":
        self._thread.start()
        return self

    @property
    def bound_us(self) -> float:
        """Of the runs that are added, so far."""
        return self._bound_us

    def wait(self, end: float) -> None:
        """Until it can become no better, or time is up."""
        left_s = min(end, self._end) - time.monotonic()
        self._thread.join(min(max(0.0, left_s), threading.TIMEOUT_MAX))

    def stop(self) -> None:
        """End what is going on; the bound stays."""
        self._end = 0.0
        self._thread.join(_PATIENCE_S)  # see Note [Nobody waits for ever]
        if self._thread.is_alive():
            _LEFT.append(self._thread)

    def _is_over(self, bound_us: float) -> bool:
        if math.isfinite(bound_us):
            self._bound_us = max(self._bound_us, bound_us)
        return time.monotonic() >= self._end

    def _run(self) -> None:
        count = len(self._links.problem.backward)
        for parts in _STAGES:
            if time.monotonic() >= self._end:
                return
            stages = {0, self._worst, *(count * part // parts for part in range(parts))}
            program = StagedProgram(
                self._links,
                budget_bytes=self._budget_bytes,
                stages=sorted(stages),
                kept=self._kept,
                dropped=self._dropped,
            )
            _, bound_us = program.solve(time_limit_s=self._end - time.monotonic(), gap=_GAP, is_over=self._is_over)
            self._bound_us = max(self._bound_us, bound_us)
