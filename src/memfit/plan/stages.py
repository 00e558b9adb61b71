"""The stages of a backward pass, or of a window of it: their turns, and which values and runs can help there."""

import dataclasses
from collections.abc import Sequence

from memfit.plan.expand import Expansion
from memfit.plan.links import Link, Links


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """A part of the backward pass, planned by itself between what is fixed."""

    end: int  # the turn after its last one
    before: int | None  # values there may be when it begins; None: it begins the pass, and that is to be chosen
    after: int  # values that must be there when it ends


@dataclasses.dataclass(frozen=True, slots=True)
class Stages:
    """Parts of a window, one after the other."""

    links: Links
    first: Sequence[int]  # turns, of each stage
    window: Window

    def __len__(self) -> int:
        return len(self.first)

    def turns(self, stage: int) -> range:
        """The turns of a stage."""
        end = self.first[stage + 1] if stage + 1 < len(self.first) else self.window.end
        return range(self.first[stage], end)

    def reads(self, turns: range) -> int:
        """What turns read, whichever ways they go."""
        reads = 0
        for turn in turns:
            for way in self.links.problem.backward[turn].ways:
                reads |= way.needs
        return reads

    def ran(self, expansion: Expansion, stage: int) -> set[int]:
        """The operations that a schedule runs in a stage."""
        return {way.operation for place in self.turns(stage) for way in expansion.backward[place]}

    def useful(self) -> list[int]:
        """By stage: values that a turn from then on reads, or that help to make one."""
        useful = [0] * len(self.first)
        reads = self.window.after
        for stage in range(len(self.first) - 1, -1, -1):
            useful[stage] = reads = self._ancestors(reads | self.reads(self.turns(stage)))
        return useful

    def runnable(self, stage: int, horizon: int | None, start: Expansion | None) -> list[Link]:
        """Ways that can help the turns from a stage on; with a horizon, those not too far before what is read soon.

        What `start` runs in the stage is never too far.
        """
        if horizon is None:
            reads = self.window.after | self.reads(range(self.first[stage], self.window.end))
            reachable = self._ancestors(reads)
            return [link for link in self.links.all if link.makes & reachable]
        is_last = stage + 1 == len(self.first)
        later = self.window.after if is_last else self.reads(self.turns(stage + 1))
        soon = self.reads(self.turns(stage)) | later
        reachable = self._ancestors(soon)
        links = [link for link in self.links.all if link.makes & reachable]
        first = min((link.rank for link in links if link.makes & soon), default=0)
        known = set() if start is None else self.ran(start, stage)
        near = {link.own for link in links if link.rank >= first - horizon}
        return [link for link in self.links.all if link.own in near or link.own in known]

    def _ancestors(self, values: int) -> int:
        found = waiting = values
        while waiting:
            number = waiting.bit_length() - 1
            waiting ^= 1 << number
            for link in self.links.making.get(number, ()):
                fresh = link.needs & ~found
                found |= fresh
                waiting |= fresh
        return found
