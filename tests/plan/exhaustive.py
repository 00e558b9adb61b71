"""The best schedule of a tiny graph, by looking at all of them.

A schedule is a way through states: how many of the model's own operations have run, and which values of
the forward pass live. Values may be dropped at any time; before a backward operation, any forward
operation may run again, any number of times and in any order. With `free=False` only what the planner looks
for: operations that help to make what this very backward operation reads, each at most once, in the order of
the forward pass. What lives at a moment is counted here from the graph alone, so that nothing is shared with
the planner but the graph and its costs.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Iterator

from memfit.ir import Graph, Operation, Phase
from memfit.plan.problem import Costs

# Place in the step, values that live, and the last operation that ran again at this place.
State = tuple[int, frozenset[int], tuple[int, int]]
NONE_YET = (-1, -1)


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """One thing that can happen: an operation runs, or a value is dropped (both zero)."""

    to: State
    time_us: float = 0.0
    live_bytes: int = 0


class Schedules:
    """All schedules of a graph. A state's place counts the operations that have run, and the start of the backward."""

    def __init__(self, graph: Graph, costs: Costs, *, free: bool = True) -> None:
        self._free = free
        self._graph = graph
        self._costs = costs
        own = {storage for operation in graph.operations for storage in operation.outputs}
        every = [*enumerate((*graph.operations, *graph.alternatives))]
        forward = [(index, each) for index, each in every if each.phase is Phase.FORWARD]
        self._values = {storage for _, each in forward for storage in each.outputs} - {*graph.held}
        self._packers = [(index, each) for index, each in forward if own.isdisjoint(each.outputs)]
        self._again = [(index, each) for index, each in forward if not own.isdisjoint(each.outputs)]
        self._backward = [(index, each) for index, each in every if each.phase is Phase.BACKWARD]
        self._start = sum(operation.phase is Phase.FORWARD for operation in graph.operations)
        self._end = len(graph.operations) + 1
        self._others = [self._others_at(place) for place in range(self._end + 1)]
        self._edges: dict[State, list[Edge]] = {}

    def least_extra_us(self, budget_bytes: int) -> float:
        """Of all schedules under a budget, the least time beyond the model's own; infinite if there is none."""

        def slower(so_far: float, edge: Edge) -> float:
            return math.inf if edge.live_bytes > budget_bytes else so_far + edge.time_us

        return self._least(slower) - own_time_us(self._graph, self._costs)

    def least_peak_bytes(self) -> int:
        return int(self._least(lambda so_far, edge: max(so_far, edge.live_bytes)))

    def _least(self, after: Callable[[float, Edge], float]) -> float:
        """The least cost of all ways from nothing to the end, where `after` never lowers it."""
        start: State = (0, frozenset(), NONE_YET)
        best = {start: 0.0}
        waiting = [(0.0, 0, start)]
        count = 0
        while waiting:
            so_far, _, state = heapq.heappop(waiting)
            if state[0] == self._end:
                return so_far
            if so_far > best[state]:
                continue
            for edge in self._edges_of(state):
                cost = after(so_far, edge)
                if cost < best.get(edge.to, math.inf):
                    best[edge.to] = cost
                    count += 1
                    heapq.heappush(waiting, (cost, -count, edge.to))
        return math.inf

    def _edges_of(self, state: State) -> list[Edge]:
        if state not in self._edges:
            place = state[0]
            moves = self._forward_moves(state) if place <= self._start else self._backward_moves(state)
            self._edges[state] = [*self._drops(state), *moves]
        return self._edges[state]

    def _drops(self, state: State) -> Iterator[Edge]:
        place, live, last = state
        for value in live - self._needed_by_forward(place):
            yield Edge((place, live - {value}, last))

    def _needed_by_forward(self, place: int) -> set[int]:
        """What an operation still to come reads; nothing can be made again before the backward pass."""
        if place > self._start:
            return set()
        coming = self._graph.operations[place : self._start]
        return {storage for operation in coming for storage in operation.inputs} | {*self._graph.written_back}

    def _forward_moves(self, state: State) -> Iterator[Edge]:
        place, live, _ = state
        for index, packer in self._packers:
            if place and {*packer.inputs} & {*self._graph.operations[place - 1].outputs}:
                yield from self._runs(state, index, packer, (place, NONE_YET))
        if place < self._start:
            yield from self._runs(state, place, self._graph.operations[place], (place + 1, NONE_YET))
        else:
            yield Edge((place + 1, live, NONE_YET))

    def _backward_moves(self, state: State) -> Iterator[Edge]:
        place, _, last = state
        own = self._graph.operations[place - 1]
        helpful = self._ancestors(own.outputs)
        for index, operation in self._again:
            order = (self._rank(operation), index)
            if self._free:
                yield from self._runs(state, index, operation, (place, NONE_YET))
            elif order > last and helpful.intersection(operation.outputs):
                yield from self._runs(state, index, operation, (place, order))
        for index, operation in self._backward:
            if operation.outputs == own.outputs:
                yield from self._runs(state, index, operation, (place + 1, NONE_YET))

    def _ancestors(self, outputs: tuple[int, ...]) -> set[int]:
        """Values that help to make what a backward operation or another way to do the same reads."""
        found: set[int] = set()
        waiting = {storage for _, each in self._backward if each.outputs == outputs for storage in each.inputs}
        while waiting:
            found |= waiting
            makers = [each for _, each in self._again if waiting.intersection(each.outputs)]
            waiting = {storage for each in makers for storage in each.inputs} - found
        return found

    def _rank(self, operation: Operation) -> int:
        """Where in the forward pass the values that an operation makes are first made."""
        places = enumerate(self._graph.operations)
        return next(place for place, each in places if {*each.outputs} & {*operation.outputs})

    def _runs(
        self, state: State, index: int, operation: Operation, then: tuple[int, tuple[int, int]]
    ) -> Iterator[Edge]:
        """The runs of an operation, in place and not. Values it makes once more are dropped before."""
        place, live, _ = state
        next_place, last = then
        outputs = {*operation.outputs}
        if not self._values.intersection(operation.inputs) <= live or live & outputs:
            return
        values = live | self._values & outputs
        there_bytes = self._bytes(self._others[place]) + self._bytes(outputs - self._values)
        there_bytes += self._costs.workspace_bytes[index]
        time_us, in_place_us = self._costs.time_us[index], self._costs.in_place_us[index]
        taken = operation.may_overwrite
        if taken in self._others[place] - self._others[next_place] - {*self._graph.tangents}:
            time_us = in_place_us
            there_bytes -= self._bytes({taken})
        yield Edge((next_place, values, last), time_us, there_bytes + self._bytes(values))
        if taken in live - self._needed_by_forward(next_place):
            values -= {taken}
            yield Edge((next_place, values, last), in_place_us, there_bytes + self._bytes(values))

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._graph.storages[storage].size_bytes for storage in storages)

    def _others_at(self, place: int) -> set[int]:
        """What lives besides values of the forward pass."""
        graph = self._graph
        done = place - (place > self._start)
        there = {storage for operation in graph.operations[:done] for storage in operation.outputs}
        read = {storage for operation in graph.operations[done:] for storage in operation.inputs}
        if place > self._start:
            ever_read = {storage for operation in graph.operations for storage in operation.inputs}
            there |= {*graph.tangents}
            read |= {*graph.tangents} - ever_read  # nothing frees these
        return {*graph.resident} | (there & (read | {*graph.held})) - self._values


def own_time_us(graph: Graph, costs: Costs) -> float:
    """What the model's own operations take in the eager run."""
    return sum(
        (costs.time_us if operation.overwrites is None else costs.in_place_us)[index]
        for index, operation in enumerate(graph.operations)
    )
