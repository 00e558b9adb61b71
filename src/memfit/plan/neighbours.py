"""Better schedules near one that fits: some values are decided again for the whole backward pass, the others stay.

Which values are kept from the forward pass is decided for all turns at once, so windows of turns (`plan/windows.py`)
cannot exchange one kept value for another. Here a part of the values is left free in the staged program of the whole
pass, a stretch of the forward pass or two of them, and everything about the others is as it was. That is a small
program, and solved in a fraction of a second.
"""

import dataclasses
import time
from collections.abc import Iterator

from memfit.plan.cuts import Cuts
from memfit.plan.expand import Expander, Expansion
from memfit.plan.problem import numbers

_LONGEST_SOLVE_S = 0.25
_GAP = 0.005
_PARTS = (12, 8, 6)  # of the values, in the order of the forward pass; two of them are free at a time
_WORTH_TAKING_US = 1.0
_MOST_CUTS = 3  # of a neighbourhood whose answer is over the budget between stages


@dataclasses.dataclass(frozen=True, slots=True)
class Neighbours:
    """Neighbours of schedules of one problem under one budget."""

    cuts: Cuts
    expander: Expander
    end: float  # when to stop, as `time.monotonic` tells it

    def improved(self, expansion: Expansion) -> Iterator[Expansion]:
        """Faster and faster schedules, until no neighbourhood has a better one or time is up."""
        better = True
        while better:
            better = False
            for free in self._neighbourhoods():
                if time.monotonic() >= self.end:
                    return
                found = self._nearby(expansion, free)
                if found is not None:
                    expansion, better = found, True
                    yield expansion

    def _neighbourhoods(self) -> Iterator[int]:
        """Sets of values that are free: two parts of the forward pass, the nearest ones first."""
        rank_of = self.cuts.links.problem.rank_of
        values = sorted(numbers(self.cuts.links.values), key=lambda number: (rank_of[number], number))
        for count in _PARTS:
            size = max(1, -(-len(values) // count))
            parts = [sum(1 << number for number in values[at : at + size]) for at in range(0, len(values), size)]
            for apart in range(1, len(parts)):
                for first in range(len(parts) - apart):
                    yield parts[first] | parts[first + apart]

    def _nearby(self, expansion: Expansion, free: int) -> Expansion | None:
        """A faster schedule that fits, if there is one with these values free."""
        limit_us = expansion.extra_us - _WORTH_TAKING_US
        for _ in range(_MOST_CUTS):
            left_s = self.end - time.monotonic()
            if left_s <= 0:
                break
            program = self.cuts.program_near(expansion)
            answer, _ = program.solve(time_limit_s=min(left_s, _LONGEST_SOLVE_S), gap=_GAP, free=free)
            own_us = self.cuts.links.problem.least_own_us  # which the program does not count
            if answer is None or answer.extra_us + own_us > limit_us:
                break
            choice = self.cuts.choice(answer)
            found = self.expander.expand(choice.wanted, choice.made_early, choice.chosen)
            if found.peak_bytes <= self.cuts.budget_bytes:
                return found if found.extra_us < limit_us else None
            if not self.cuts.cut(found):
                break
        return None
