"""The ways to make values again, with chains drawn together, so that there is less to decide.

Note [Inside a chain]
    A value that no backward turn reads, that one way alone reads, whose maker makes nothing else, and that is no
    smaller than what its reader makes is never worth keeping: it has no variable, and making it is part of that way.
"""

import dataclasses

from memfit.plan.problem import Problem, Way, numbers


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One or more ways that are run together, see Note [Inside a chain]."""

    needs: int
    makes: int
    time_us: float  # at best: in place where that is faster
    fresh_us: float  # if what it may overwrite is still needed
    overwrites: int
    rank: int
    own: int  # the operation that makes what it makes
    operations: frozenset[int]


class Links:
    """The ways of a problem, with chains drawn together."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.read_by_backward = _read_by_backward(problem)
        self.inside = self._inside_chains()
        self.all = self._links()
        self.making: dict[int, list[Link]] = {}
        for link in self.all:
            for number in numbers(link.makes):
                self.making.setdefault(number, []).append(link)
        every = (1 << len(problem.storages)) - 1
        self.values = every & ~self.inside

    def _inside_chains(self) -> int:
        """See Note [Inside a chain]."""
        problem = self.problem
        readers, makes_of = self._readers()
        inside = 0
        for number, operations in readers.items():
            made = {makes_of.get(operation, 0) for operation in operations}
            if len(made) != 1 or self.read_by_backward >> number & 1 or number in problem.packers:
                continue
            makes_several = any(way.makes != 1 << number for way in problem.makers[number])
            if not makes_several and problem.sizes[number] >= problem.size_of(made.pop()):
                inside |= 1 << number
        return inside

    def _readers(self) -> tuple[dict[int, set[int]], dict[int, int]]:
        """By value: the forward operations that read it; by operation: the values it makes."""
        problem = self.problem
        again = [way for ways in problem.makers for way in ways]
        readers: dict[int, set[int]] = {}
        for way in (*again, *(turn.ways[0] for turn in problem.forward), *problem.packers.values()):
            for number in numbers(way.needs):
                readers.setdefault(number, set()).add(way.operation)
        return readers, {way.operation: way.makes for way in again}

    def _links(self) -> list[Link]:
        unique = {way.operation: way for ways in self.problem.makers for way in ways}
        return [self._link(way) for _, way in sorted(unique.items()) if way.makes & ~self.inside]

    def _link(self, way: Way) -> Link:
        needs, time_us = way.needs, way.least_us
        overwrites = way.overwrites & ~self.inside
        fresh_us = way.time_us if overwrites else way.least_us
        operations = {way.operation}
        while needs & self.inside:
            number = (needs & self.inside).bit_length() - 1
            maker = min(self.problem.makers[number], key=lambda each: each.least_us)
            time_us, fresh_us = time_us + maker.least_us, fresh_us + maker.least_us
            needs = needs & ~(1 << number) | maker.needs
            operations.add(maker.operation)
        return Link(
            needs=needs,
            makes=way.makes & ~self.inside,
            time_us=time_us,
            fresh_us=fresh_us,
            overwrites=overwrites,
            rank=way.rank,
            own=way.operation,
            operations=frozenset(operations),
        )


def _read_by_backward(problem: Problem) -> int:
    reads = 0
    for turn in problem.backward:
        for way in turn.ways:
            reads |= way.needs
    return reads
