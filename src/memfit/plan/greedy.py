"""A first plan without a solver: drop the cheapest bytes wherever there are too many.

While some moment is over the budget, take the worst one and drop, of the values that live through it
without being used, those whose bytes are cheapest to make again, from their last use before it to
their next use after it. What it looks at is the area over the budget: single moves on the peak alone
stick. Its plans are 1.5 to 3 times as slow as those of the staged program, and are there in an instant.
"""

import math
import time
from collections.abc import Sequence

from memfit.plan.choice import Choice, everything_kept
from memfit.plan.expand import Expander, Expansion
from memfit.plan.problem import Problem, Way, numbers

_MOST_ROUNDS = 1000


def greedy(
    problem: Problem,
    budget_bytes: int,
    *,
    kept: int = 0,
    dropped: int = 0,
    start: Choice | None = None,
    end: float = math.inf,
) -> Expansion:
    """A plan under the budget, or the lowest that was come by. `kept` and `dropped` are honoured.

    `start` is a plan that is a little over the budget; by default everything is kept. `end` is when to stop, as
    `time.monotonic` tells it.
    """
    return _Greedy(problem, budget_bytes, kept, dropped, start).run(end)


class _Greedy:
    def __init__(self, problem: Problem, budget_bytes: int, kept: int, dropped: int, start: Choice | None) -> None:
        self._problem = problem
        self._budget_bytes = budget_bytes
        self._kept = kept
        self._expander = Expander(problem)
        wanted = everything_kept(problem) if start is None else start.wanted
        self._wanted = [values | kept for values in wanted]
        self._made_early = {} if start is None else dict(start.made_early)
        self._chosen = {} if start is None else dict(start.chosen)
        self._readers = _readers(problem)
        self._forms = _smallest_forms(problem)
        for number in numbers(dropped if start is None else 0):
            self._drop(number, 0)

    def run(self, end: float) -> Expansion:
        best = self._expander.expand(self._wanted, self._made_early, self._chosen)
        for _ in range(_MOST_ROUNDS):
            if best.over(self._budget_bytes) == 0 or time.monotonic() > end:
                break
            if not self._drop_some(best):
                break
            expansion = self._expander.expand(self._wanted, self._made_early, self._chosen)
            if expansion.over(self._budget_bytes) > 2 * best.over(self._budget_bytes):
                break
            best = min(best, expansion, key=lambda each: (each.over(self._budget_bytes), each.extra_us))
        return best

    def _drop_some(self, expansion: Expansion) -> bool:
        """Drop what covers the excess of the worst moment; False if nothing can be dropped there."""
        place, excess_bytes = self._worst(expansion)
        if self._go_another_way(expansion, place):
            return True
        live = expansion.live[place] & self._wanted[place] & ~self._kept
        turn = self._problem.backward[place]
        candidates = sorted((self._price(number, place), number) for number in numbers(live & ~turn.ways[0].needs))
        freed_bytes = 0
        for price, number in candidates:
            if freed_bytes >= excess_bytes or price == math.inf:  # nothing makes a packed form again
                break
            self._drop(number, place)
            freed_bytes += self._problem.sizes[number]
        return freed_bytes > 0

    def _go_another_way(self, expansion: Expansion, place: int) -> bool:
        """If a turn's own run is too high there, let it go the fastest way that needs less; False if there is none."""
        ways = self._problem.backward[place].ways
        gone = expansion.backward[place][-1]
        if len(ways) == 1 or expansion.highest[place] != gone.operation:
            return False
        if expansion.peaks[place] <= max(self._budget_bytes, *expansion.forward_peaks):
            return False  # it is the forward pass that is too high
        used_bytes = self._used_bytes(gone)
        live = expansion.live[place]
        leaner = [
            number
            for number, way in enumerate(ways)
            if self._used_bytes(way) < used_bytes and self._expander.cost(way.needs, live) < math.inf
        ]
        if leaner:
            self._chosen[place] = min(leaner, key=lambda number: ways[number].time_us)
        return bool(leaner)

    def _used_bytes(self, way: Way) -> int:
        return way.workspace_bytes + self._problem.size_of(way.needs & ~way.overwrites)

    def _worst(self, expansion: Expansion) -> tuple[int, int]:
        """The backward turn to free bytes at, and how many; for the forward pass that is the first turn."""
        place = max(range(len(expansion.peaks)), key=lambda each: expansion.peaks[each])
        forward_peak = max(expansion.forward_peaks, default=0)
        if forward_peak > expansion.peaks[place]:
            return 0, forward_peak - self._budget_bytes
        return place, expansion.peaks[place] - self._budget_bytes

    def _price(self, number: int, place: int) -> float:
        """Microseconds per byte of making a value again when it is next read."""
        problem = self._problem
        readers = self._readers[number]
        next_read = next((each for each in readers if each >= place), place)
        live = self._wanted[next_read] & ~(1 << number)
        price = self._expander.cost(1 << number, live) / max(1, problem.sizes[number])
        packed = self._forms.get(number)
        if packed is None or self._is_read_before(number, place):
            return price
        saved_bytes = problem.sizes[number] - problem.sizes[packed]
        if saved_bytes <= 0:
            return price
        packed_us = problem.packers[packed].time_us + self._expander.cost(1 << number, live | 1 << packed)
        return min(price, packed_us / saved_bytes)

    def _is_read_before(self, number: int, place: int) -> bool:
        return any(each < place for each in self._readers[number])

    def _drop(self, number: int, place: int) -> None:
        readers = self._readers[number]
        first = max((each + 1 for each in readers if each < place), default=0)
        last = next((each for each in readers if each >= place), len(self._wanted) - 1)
        live = self._wanted[last] & ~(1 << number)
        packed = self._forms.get(number) if first == 0 else None
        if packed is not None and self._packing_pays(number, packed, live):
            for each in range(readers[-1] + 1 if readers else 0):
                self._wanted[each] |= 1 << packed
        for each in range(first, last + 1):
            self._wanted[each] &= ~(1 << number)
            if each in self._made_early:
                self._made_early[each] &= ~(1 << number)

    def _packing_pays(self, number: int, packed: int, live: int) -> bool:
        packed_us = self._problem.packers[packed].time_us + self._expander.cost(1 << number, live | 1 << packed)
        return packed_us < self._expander.cost(1 << number, live)


def _smallest_forms(problem: Problem) -> dict[int, int]:
    """By value: the smallest packed form it can be made again from."""
    forms: dict[int, int] = {}
    for number, ways in enumerate(problem.makers):
        packed = [each for way in ways for each in numbers(way.needs) if each in problem.packers]
        if packed:
            forms[number] = min(packed, key=lambda each: (problem.sizes[each], each))
    return forms


def _readers(problem: Problem) -> Sequence[list[int]]:
    """By value: the backward turns that read it, in order."""
    readers: list[list[int]] = [[] for _ in problem.storages]
    for place, turn in enumerate(problem.backward):
        for number in numbers(turn.ways[0].needs):
            readers[number].append(place)
    return readers
