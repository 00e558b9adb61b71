"""Where the backward pass is cut into stages, and what a staged program is told about the turns in between.

An answer of a staged program is exact at the first turns of its stages. Walking it shows where it is over the budget in
between: stages are cut there, and rows are added for runs and forward turns that are too high.
"""

import dataclasses
from collections.abc import Iterator

from memfit.plan.choice import Choice, with_answer
from memfit.plan.expand import Expansion
from memfit.plan.links import Links
from memfit.plan.staged import StagedAnswer, StagedProgram

_SMALL_PROGRAM = 1200  # stages times ways: below, no horizon is needed


@dataclasses.dataclass(kw_only=True)
class Cuts:
    """The stages of a search, and the rows beside them; they only become more."""

    links: Links
    budget_bytes: int
    kept: int
    dropped: int
    horizon: int
    stages: set[int] = dataclasses.field(default_factory=set)
    margins: dict[int, int] = dataclasses.field(default_factory=dict)  # by turn: bytes that are left free
    _forward_rows: set[int] = dataclasses.field(default_factory=set)
    _run_rows: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    _near: tuple[Expansion, int, StagedProgram] | None = None  # the last one of `program_near`, and what it is of

    @property
    def is_small(self) -> bool:
        """Whether programs can do without a horizon, so that their bounds hold for all schedules."""
        return len(self.stages) * len(self.links.all) < _SMALL_PROGRAM

    def program(self, start: Expansion | None) -> StagedProgram:
        """The program to search for a better schedule than `start`, if there is one."""
        is_small = self.is_small
        return self._program(None if is_small else start, self.margins, None if is_small else self.horizon)

    def program_near(self, start: Expansion) -> StagedProgram:
        """The program of schedules near one that fits: without margins, which it may not leave free."""
        if self._near is None or self._near[0] is not start or self._near[1] != self._count:
            self._near = start, self._count, self._program(start, {}, self.horizon)
        return self._near[2]

    def _program(self, start: Expansion | None, margins: dict[int, int], horizon: int | None) -> StagedProgram:
        return StagedProgram(
            self.links,
            budget_bytes=self.budget_bytes,
            stages=sorted(self.stages),
            forward_rows=sorted(self._forward_rows),
            run_rows=sorted(self._run_rows),
            margins=margins,
            kept=self.kept,
            dropped=self.dropped,
            horizon=horizon,
            start=start,
        )

    def choice(self, answer: StagedAnswer) -> Choice:
        """What an answer of a program with the stages of now wants."""
        count = len(self.links.problem.backward)
        return with_answer(Choice([0] * count, {}, {}), sorted(self.stages), count, answer)

    def cut(self, expansion: Expansion) -> bool:
        """Cut at the worst turn of every stretch that is over the budget, and add rows; False: nothing is new."""
        known = self._count
        forward = [place for place, peak in enumerate(expansion.forward_peaks) if peak > self.budget_bytes]
        if forward:
            self._forward_rows.add(max(forward, key=lambda place: expansion.forward_peaks[place]))
        for stretch in _stretches([place for place, peak in enumerate(expansion.peaks) if peak > self.budget_bytes]):
            worst = max(stretch, key=lambda place: expansion.peaks[place])
            is_new = worst not in self.stages
            self.stages.add(worst)
            if expansion.highest[worst] != expansion.backward[worst][-1].operation:
                self._run_rows.add((worst, expansion.highest[worst]))
                is_new = False
            if not is_new and worst + 1 < len(expansion.peaks):
                self.stages.add(worst + 1)
        return self._count != known

    @property
    def _count(self) -> int:
        return len(self.stages) + len(self._run_rows) + len(self._forward_rows)

    def widen_margins(self, expansion: Expansion) -> None:
        """What the rows cannot say exactly is left free as a margin: the bound no longer speaks of it."""
        for place, peak in enumerate(expansion.peaks):
            if peak > self.budget_bytes and place in self.stages:
                self.margins[place] = self.margins.get(place, 0) + peak - self.budget_bytes


def _stretches(places: list[int]) -> Iterator[list[int]]:
    """Runs of neighbouring turns; a gap of two does not part them."""
    stretch: list[int] = []
    for place in places:
        if stretch and place - stretch[-1] > 3:
            yield stretch
            stretch = []
        stretch.append(place)
    if stretch:
        yield stretch
