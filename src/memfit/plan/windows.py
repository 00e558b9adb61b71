"""Plan a part of the backward pass again, turn by turn, between what is fixed before and after it.

Given what lives when a window begins and what must live when it ends, the turns in it are a small problem of their own,
whatever the rest of the pass does. So two things are cheap that are dear for the whole pass:

- **fit**: a schedule that is over the budget inside some stages is made to fit there, exactly, where dropping
  more at random would cost much more;
- **improve**: large-neighbourhood search. Window after window of the best schedule is planned again, and the
  answer is taken if the whole is faster.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence

from memfit.plan.choice import choice_of, with_answer
from memfit.plan.expand import Expander, Expansion
from memfit.plan.links import Links
from memfit.plan.staged import StagedProgram
from memfit.plan.stages import Window

_MOST_STAGES = 16  # of a window
_MOST_CUTS = 6  # rounds of a window
_LONGEST_SOLVE_S = 0.7
_WIDEST_TO_FIT = 40  # turns of a stage that is planned again to fit
_WORTH_TAKING_US = 1.0
_WIDTHS = (12, 24, 40)  # turns of a window while improving


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of schedules of one problem under one budget."""

    links: Links
    expander: Expander
    budget_bytes: int
    kept: int
    dropped: int
    horizon: int
    end: float  # when to stop, as `time.monotonic` tells it

    def fitted(self, expansion: Expansion, stages: Sequence[int]) -> Expansion | None:
        """A schedule whose stages that are over the budget are planned again; None if that does not help."""
        bounds = [*stages, len(expansion.peaks)]
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            if not self._is_over(expansion, start, end):
                continue
            if end - start > _WIDEST_TO_FIT:
                return None  # too little is decided yet
            wider = bounds[max(0, number - 1)], bounds[min(number + 2, len(bounds) - 1)]
            found = self._planned(expansion, start, end) or self._planned(expansion, *wider)
            if found is None:
                return None
            expansion = found
        return expansion if expansion.peak_bytes <= self.budget_bytes else None

    def improved(self, expansion: Expansion) -> Iterator[Expansion]:
        """Faster and faster schedules, until no window has a better answer or time is up."""
        count = len(expansion.peaks)
        for width in _WIDTHS:
            better = True
            while better:
                better = False
                for start in range(0, max(1, count - width // 2), max(1, width // 2)):
                    if time.monotonic() >= self.end:
                        return
                    end = min(count, start + width)
                    if not any(len(ways) > 1 for ways in expansion.backward[start:end]):
                        continue  # nothing is made again there
                    found = self._planned(expansion, start, end, start_from=expansion)
                    if found is not None and found.extra_us < expansion.extra_us - _WORTH_TAKING_US:
                        expansion = found
                        better = True
                        yield expansion

    def _planned(
        self, expansion: Expansion, start: int, end: int, start_from: Expansion | None = None
    ) -> Expansion | None:
        """The schedule with one window planned again, if it then fits there and nowhere becomes worse."""
        count = len(expansion.peaks)
        choice = choice_of(self.links.problem, expansion)
        window = Window(end, None if start == 0 else expansion.live[start], 0 if end == count else expansion.live[end])
        stages = set(self._first_stages(expansion, start, end))
        run_rows: set[tuple[int, int]] = set()
        forward_rows: set[int] = set()
        for _ in range(_MOST_CUTS):
            left_s = self.end - time.monotonic()
            if left_s <= 0:
                return None
            program = StagedProgram(
                self.links,
                budget_bytes=self.budget_bytes,
                stages=sorted(stages),
                forward_rows=sorted(forward_rows),
                run_rows=sorted(run_rows),
                kept=self.kept,
                dropped=self.dropped,
                horizon=self.horizon,
                window=window,
                start=start_from,
            )
            answer, _ = program.solve(time_limit_s=min(left_s, _LONGEST_SOLVE_S), gap=0.005)
            if answer is None:
                return None
            planned = with_answer(choice, sorted(stages), end, answer)
            found = self.expander.expand(planned.wanted, planned.made_early, planned.chosen)
            if not self._is_over(found, start, end):
                return found
            if not self._cut(found, start, end, stages, run_rows, forward_rows):
                return None
        return None

    def _first_stages(self, expansion: Expansion, start: int, end: int) -> list[int]:
        """All turns of a narrow window; of a wide one the highest of every part."""
        if end - start <= _MOST_STAGES:
            return list(range(start, end))
        bounds = [start + (end - start) * part // _MOST_STAGES for part in range(_MOST_STAGES + 1)]
        highest = [max(range(*each), key=lambda place: expansion.peaks[place]) for each in itertools.pairwise(bounds)]
        return sorted({start, *highest})

    def _is_over(self, expansion: Expansion, start: int, end: int) -> bool:
        peaks = expansion.peaks[start:end] + (expansion.forward_peaks if start == 0 else [])
        return max(peaks, default=0) > self.budget_bytes

    def _cut(
        self,
        expansion: Expansion,
        start: int,
        end: int,
        stages: set[int],
        run_rows: set[tuple[int, int]],
        forward_rows: set[int],
    ) -> bool:
        """Say more about the turns that are over the budget; False if all is said."""
        known = len(stages) + len(run_rows) + len(forward_rows)
        for place in range(start, end):
            if expansion.peaks[place] <= self.budget_bytes:
                continue
            stages.add(place)
            if place + 1 < end:
                stages.add(place + 1)
            if expansion.highest[place] != expansion.backward[place][-1].operation:
                run_rows.add((place, expansion.highest[place]))
        highest = max(range(len(expansion.forward_peaks)), key=lambda place: expansion.forward_peaks[place], default=-1)
        if start == 0 and highest >= 0 and expansion.forward_peaks[highest] > self.budget_bytes:
            forward_rows.add(highest)
        return len(stages) + len(run_rows) + len(forward_rows) > known
