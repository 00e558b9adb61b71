"""Find the fastest schedule under a budget, and say how far from the best possible it can be.

1. A greedy plan, there in an instant (`plan/greedy.py`).
2. The staged program on a few stages gives a schedule that is exact at the stages' first turns. Walking it shows
   where it is over the budget in between; the stages are cut there (`plan/cuts.py`), and the program is solved again,
   from the best plan so far (`plan/staged.py`). Beside it, the same program gives a bound that no schedule can be below
   (`plan/bounding.py`).
3. Where an answer is over the budget inside some stages, those are planned again turn by turn, between what it
   wants before and after them (`plan/windows.py`).
4. Near the best plan there are better ones: with some values decided again for the whole pass, the others as they are
   (`plan/neighbours.py`), and with window after window planned again.
5. It goes on in phases, each as long as all before it, while a better plan may be worth the time: it ends when the gap
   between plan and bound is small for the seconds spent, when a phase has found nothing, or when time is up.

Same input, same plan: work is limited by counts, and by the clock only when `time_limit_s` runs out.
"""

import dataclasses
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator

from memfit.errors import InfeasibleBudget
from memfit.plan.bounding import Bounding
from memfit.plan.choice import everything_kept
from memfit.plan.cuts import Cuts
from memfit.plan.expand import Expander, Expansion
from memfit.plan.greedy import greedy
from memfit.plan.links import Links
from memfit.plan.neighbours import Neighbours
from memfit.plan.problem import Problem
from memfit.plan.staged import StagedAnswer
from memfit.plan.windows import Windows
from memfit.units import format_bytes

log = logging.getLogger(__name__)

_FIRST_STAGES = 12
_LEAST_GREEDY_S = 5.0  # for a first plan, even if no time is given
_LEAST_REPAIR_S = 2.0  # for an answer that comes when time is up
_MOST_ROUNDS = 30
_CLOSE_ENOUGH = 0.02  # of the bound, and on top of it
_CLOSE_SHARE = 0.005  # of the step's time: with no more than that between plan and bound the search ends
_LONGEST_SOLVE_S = 1.5
_ROUND_GAP = 0.03  # of an answer that is cut again anyway
_LONGEST_FIT_S = 1.0  # an answer that is over the budget here and there
_FIRST_PHASE_S = 1.5
_IMPROVING_SHARE = 0.6  # of a phase: for plans near the best one
_POINT_SHARE = 0.15  # of the time: to be spent on each percent that a plan may be slower than the best
_WORTH_ANOTHER_PHASE = 0.001  # of the step's time: what a phase must have gained
_CLOSE_TO_SMALLEST = 0.015  # of the room above the floor: then no smaller budget is tried
OPTIMIZER_STEP, OUTSIDE_LOSS = -1, -2  # what sets a floor and is no operation
_INTERRUPTED = "interrupted: the best plan so far"
_HORIZON_SHARE = 0.1  # of the forward pass: how far back a stage may start making values again
_LEAST_HORIZON = 20  # operations: of short forward passes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The state of a search, shown while it runs."""

    seconds: float
    slowdown: float | None  # of the best plan so far, as a fraction of the step; None: no plan yet
    bound: float
    stages: int


Report = Callable[[Found], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solution:
    """The best schedule found and what is known about all others."""

    expansion: Expansion
    bound_us: float  # no schedule under the budget adds less
    seconds: float
    log: tuple[str, ...]
    interrupted: bool = False  # Ctrl-C ended the search: nothing more is to be tried


class Planner:
    """Plans of one problem at any budget; what is learned at one is used at the next."""

    def __init__(self, problem: Problem, *, kept: int = 0, dropped: int = 0) -> None:
        self.problem = problem
        self.kept, self.dropped = kept, dropped
        self.links = Links(problem)
        self.expander = Expander(problem)
        self.unplanned = self.expander.expand(everything_kept(problem))
        self.found: list[Expansion] = []  # plans of earlier budgets: those that fit are a start for the next

    def floor_bytes(self) -> int:
        """No schedule of these operations can be below: the largest working set of a single one."""
        return max((size_bytes for size_bytes, _ in self._working_sets()), default=0)

    def floor_operation(self) -> int:
        """The operation that sets the floor, or one of `OPTIMIZER_STEP` and `OUTSIDE_LOSS`."""
        return max(self._working_sets(), default=(0, OPTIMIZER_STEP))[1]

    def _working_sets(self) -> Iterator[tuple[int, int]]:
        size_of = self.problem.size_of
        yield self.problem.end_bytes, OPTIMIZER_STEP
        yield self.problem.loss_bytes, OUTSIDE_LOSS
        for turn in (*self.problem.forward, *self.problem.backward):
            least = []
            for way in turn.ways:
                taken_bytes = size_of(way.overwrites) if way.overwrites else 0
                own_bytes = size_of(way.needs | way.makes) - taken_bytes
                least.append(turn.during_bytes + own_bytes + way.workspace_bytes)
            yield min(least), turn.ways[0].operation

    def solve(
        self, budget_bytes: int, *, time_limit_s: float = 6.0, report: Report | None = None, enough: float | None = None
    ) -> Solution:
        """The best plan under a budget found in time. Raises InfeasibleBudget if there is none or none is found.

        A plan that slows the step down by no more than `enough` ends the search.
        """
        solution = _Search(self, budget_bytes, time_limit_s, report, enough=enough).run()
        if solution is None:
            raise InfeasibleBudget(
                f"no plan under {format_bytes(budget_bytes)} was found; the largest operation alone needs "
                f"{format_bytes(self.floor_bytes())}"
            )
        self.found.append(solution.expansion)
        return solution

    def smallest(self, *, time_limit_s: float = 6.0) -> Solution:
        """A plan whose peak is as low as can be found: between what failed and what was found the middle is tried."""
        floor_bytes = failed_bytes = self.floor_bytes()
        found_bytes = max(floor_bytes, self.unplanned.peak_bytes)
        close_bytes = int(_CLOSE_TO_SMALLEST * (found_bytes - floor_bytes))
        end = time.monotonic() + time_limit_s
        best: Solution | None = None
        while found_bytes > floor_bytes and (best is None or time.monotonic() < end):
            target_bytes = (failed_bytes + found_bytes) // 2
            if found_bytes - failed_bytes <= close_bytes:
                if failed_bytes > floor_bytes:
                    break
                target_bytes = floor_bytes
            remaining_s = end - time.monotonic()
            try:
                found = _Search(self, target_bytes, max(0.5, remaining_s / 3), None, enough=math.inf).run()
            except KeyboardInterrupt:
                if best is None:
                    raise
                return dataclasses.replace(best, log=(*best.log, _INTERRUPTED), interrupted=True)
            if found is not None and found.interrupted:
                return found
            if found is not None:
                best, found_bytes = found, found.expansion.peak_bytes
            elif target_bytes == failed_bytes:
                break
            else:
                failed_bytes = target_bytes
        return best or self.unplanned_solution()

    def by_hand(self) -> Solution:
        """Nothing but what the user asked for: values are dropped once and made again when first read."""
        expansion = greedy(self.problem, sys.maxsize, kept=self.kept, dropped=self.dropped)
        return Solution(expansion=expansion, bound_us=0.0, seconds=0.0, log=("no budget: as asked for by hand",))

    def all_again(self) -> Solution:
        """Every value that may be is dropped and made again when first read: what checkpointing the whole does."""
        dropped = ((1 << len(self.problem.sizes)) - 1) & ~self.kept
        expansion = greedy(self.problem, sys.maxsize, kept=self.kept, dropped=dropped)
        return Solution(expansion=expansion, bound_us=0.0, seconds=0.0, log=("everything is made again",))

    def unplanned_solution(self) -> Solution:
        return Solution(expansion=self.unplanned, bound_us=0.0, seconds=0.0, log=("nothing is planned",))


class _Search:
    def __init__(
        self,
        planner: Planner,
        budget_bytes: int,
        time_limit_s: float,
        report: Report | None,
        *,
        enough: float | None = None,
    ) -> None:
        self._planner = planner
        self._problem = planner.problem
        self._budget_bytes = budget_bytes
        self._start = time.monotonic()
        self._end = self._start + time_limit_s
        self._phase_end = self._start + min(_FIRST_PHASE_S, time_limit_s)
        self._report = report
        self._enough = enough
        self._best: Expansion | None = None
        self._interrupted = False
        self._rounds_left = _MOST_ROUNDS
        self._is_all_tried = False
        self._known_bound_us = self._least_us()
        self._bounding: Bounding | None = None
        self._log: list[str] = []
        self._cuts = Cuts(
            links=planner.links,
            budget_bytes=budget_bytes,
            kept=planner.kept,
            dropped=planner.dropped,
            horizon=self._horizon,
        )

    def run(self) -> Solution | None:
        if self._planner.floor_bytes() > self._budget_bytes:
            return None
        try:
            self._search()
        except KeyboardInterrupt:
            if self._best is None:
                raise
            self._interrupted = True
            self._say(_INTERRUPTED)
        finally:
            if self._bounding is not None:
                self._bounding.stop()
        if self._best is None:
            return None
        return Solution(
            expansion=self._best,
            bound_us=min(self._bound_us, self._best.extra_us),
            seconds=time.monotonic() - self._start,
            log=tuple(self._log),
            interrupted=self._interrupted,
        )

    def _search(self) -> None:
        self._take(self._planner.unplanned, "unplanned")
        for earlier in self._planner.found:
            self._take(earlier, "a plan of another budget")
        self._take(
            greedy(
                self._problem,
                self._budget_bytes,
                kept=self._planner.kept,
                dropped=self._planner.dropped,
                end=self._end + _LEAST_GREEDY_S,
            ),
            "greedy",
        )
        if not self._problem.backward:
            return  # gradients that nothing computes: what eager does is all there is
        self._first_stages()
        before_us = math.inf
        while not self._is_done():
            self._phase()
            if self._best is None or not self._is_worth_another(before_us):
                break
            before_us = self._best.extra_us
            self._phase_end = min(self._end, self._start + 2 * (time.monotonic() - self._start))

    def _phase(self) -> None:
        """Solve and cut until there is a plan and a part of the phase is over, then look near that plan."""
        end_of_rounds = self._phase_end - _IMPROVING_SHARE * (self._phase_end - time.monotonic())
        while self._rounds_left and not self._is_done():
            self._rounds_left -= 1
            if not self._round():
                self._rounds_left = 0
            if self._best is not None and time.monotonic() > end_of_rounds:
                break
        self._improve()
        if self._bounding is not None and self._best is not None and not self._is_done():
            self._bounding.wait(self._phase_end)  # which may show that the plan is good enough

    def _is_worth_another(self, before_us: float) -> bool:
        """Return whether a better plan may be worth the time, and the last phase leaves hope for one."""
        assert self._best is not None
        if self._is_all_tried or before_us - self._best.extra_us < _WORTH_ANOTHER_PHASE * self._problem.own_time_us:
            return False
        points = 100 * self._share(self._best.extra_us - self._bound_us)
        return time.monotonic() - self._start < _POINT_SHARE * points * (self._end - self._start)

    def _improve(self) -> None:
        """Look near the best plan, among other values to keep and then among other turns to make them again at."""
        if self._best is None or self._is_done():
            return
        near = Neighbours(self._cuts, self._planner.expander, self._phase_end)
        for better in () if self._cuts.is_small else near.improved(self._best):  # small programs are solved whole
            self._take(better, "some values decided again")
            if self._is_done():
                return
        for better in self._windows(self._phase_end).improved(self._best):
            self._take(better, "a window planned again")
            if self._is_done():
                return
        self._is_all_tried = not self._rounds_left and time.monotonic() < self._phase_end

    def _first_stages(self) -> None:
        count = len(self._problem.backward)
        peaks = self._planner.unplanned.peaks
        worst = max(range(count), key=lambda place: peaks[place])
        self._cuts.stages |= {0, worst, *(count * part // _FIRST_STAGES for part in range(_FIRST_STAGES))}
        if self._enough != math.inf and not self._cuts.is_small and time.monotonic() < self._end:
            planner = self._planner
            self._bounding = Bounding(
                planner.links,
                self._budget_bytes,
                kept=planner.kept,
                dropped=planner.dropped,
                worst=worst,
                end=self._end,
            ).start()

    @property
    def _bound_us(self) -> float:
        """No schedule adds less, as far as is known."""
        if self._bounding is None:
            return self._known_bound_us
        return max(self._known_bound_us, self._bounding.bound_us + self._problem.least_own_us)

    def _round(self) -> bool:
        """Solve, walk, cut. False: nothing more to learn."""
        holds_for_all = self._cuts.is_small and not self._cuts.margins
        answer, bound_us = self._solve_stages()
        if holds_for_all:
            self._known_bound_us = max(self._known_bound_us, bound_us + self._problem.least_own_us)
        if answer is None:
            return False
        expansion = self._tried(answer)
        if expansion.peak_bytes <= self._budget_bytes:
            return False
        if not self._cuts.cut(expansion):
            self._cuts.widen_margins(expansion)
        return True

    def _least_us(self) -> float:
        """What no plan is below at any budget: every turn the fastest way, and kept or overwritten as is better."""
        gains = (turn.ways[0].time_us - min(way.time_us for way in turn.ways) for turn in self._problem.backward)
        kept_us = sum(min(0.0, kept_us) for kept_us in self._problem.kept_from_us.values())
        return self._problem.least_own_us + kept_us - sum(gains)

    def _tried(self, answer: StagedAnswer) -> Expansion:
        """Walk an answer; if it is over the budget, repair what is by dropping more."""
        choice = self._cuts.choice(answer)
        expansion = self._planner.expander.expand(choice.wanted, choice.made_early, choice.chosen)
        self._take(expansion, f"{len(self._cuts.stages)} stages")
        if expansion.peak_bytes > self._budget_bytes:
            planner = self._planner
            repaired = greedy(
                self._problem,
                self._budget_bytes,
                kept=planner.kept,
                dropped=planner.dropped,
                start=choice,
                end=max(self._end, time.monotonic() + _LEAST_REPAIR_S),
            )
            self._take(repaired, f"{len(self._cuts.stages)} stages, repaired")
            fitted = self._windows(time.monotonic() + _LONGEST_FIT_S).fitted(expansion, sorted(self._cuts.stages))
            if fitted is not None:
                self._take(fitted, f"{len(self._cuts.stages)} stages, fitted")
        return expansion

    def _windows(self, end: float) -> Windows:
        planner = self._planner
        return Windows(
            links=planner.links,
            expander=planner.expander,
            budget_bytes=self._budget_bytes,
            kept=planner.kept,
            dropped=planner.dropped,
            horizon=self._horizon,
            end=end,
        )

    @property
    def _horizon(self) -> int:
        """How many ranks back a run may be; two for an operation."""
        return 2 * max(_LEAST_HORIZON, int(_HORIZON_SHARE * len(self._problem.forward)))

    def _solve_stages(self) -> tuple[StagedAnswer | None, float]:
        program = self._cuts.program(self._best)
        remaining_s = self._end - time.monotonic()
        answer, bound_us = program.solve(time_limit_s=min(remaining_s, _LONGEST_SOLVE_S), gap=_ROUND_GAP)
        self._say(
            f"{len(self._cuts.stages)} stages, {program.size[0]} variables: "
            + ("no answer" if answer is None else f"{self._share(answer.extra_us):.2%}")
            + f", bound {self._share(bound_us):.2%}"
        )
        return answer, bound_us

    def _take(self, expansion: Expansion, origin: str) -> None:
        """Keep a plan if it fits and is the fastest so far."""
        fits = expansion.peak_bytes <= self._budget_bytes and self._honours(expansion)
        if fits and (self._best is None or expansion.extra_us < self._best.extra_us):
            self._best = expansion
            self._say(f"{origin}: {self._share(expansion.extra_us):.2%} slower")

    def _honours(self, expansion: Expansion) -> bool:
        """Whether a plan does what the user asked for: drops what is to be dropped, makes nothing kept again."""
        crossing = expansion.live[0] if expansion.live else 0
        made_again = 0
        for runs in expansion.backward:
            for way in runs[:-1]:
                made_again |= way.makes
        return not crossing & self._planner.dropped and not made_again & self._planner.kept

    def _is_done(self) -> bool:
        if time.monotonic() >= self._end:
            self._say("time is up")
            return True
        if self._best is None:
            return False
        least_us = min(0.0, self._least_us())  # what is shed comes on top of this
        gap_us = _CLOSE_ENOUGH * (self._bound_us - least_us) + _CLOSE_SHARE * self._problem.own_time_us
        if self._enough is not None and self._share(self._best.extra_us) <= self._enough:
            return True
        return self._best.extra_us <= self._bound_us + gap_us

    def _share(self, extra_us: float) -> float:
        return extra_us / max(self._problem.own_time_us, 1e-9)

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self._start
        self._log.append(f"{seconds:.1f} s: {text}")
        log.debug("%s", self._log[-1])
        if self._report is not None:
            slowdown = None if self._best is None else self._share(self._best.extra_us)
            bound = self._share(self._bound_us)
            self._report(Found(seconds=seconds, slowdown=slowdown, bound=bound, stages=len(self._cuts.stages)))
