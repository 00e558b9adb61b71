"""What there is to decide: which values of the forward pass live when, in a form made for searching.

Note [Order]
    The model's own operations run in the order of the eager run, forward and backward, each
    once. What a plan adds is runs in between: forward operations again, before the backward
    operation that needs them. So a plan is given by the values that live when each backward
    operation's turn comes (`plan/expand.py` turns that into a program).

Note [Small values]
    Values that do not matter together (statistics of a BatchNorm, scalars) are always kept.

Sets of values are integers with one bit a value, so that a union is one machine operation.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence

from memfit.ir import ACCUMULATE, GENERATOR_STATE_BYTES, Graph, LossMemory, Operation, OptimizerMemory, Phase

_SMALL_SHARE = 0.002  # of all activations: what small values may be together


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What operations take, by number: the model's own, then the alternatives."""

    time_us: Sequence[float]
    in_place_us: Sequence[float]  # of the run that overwrites its `may_overwrite`
    workspace_bytes: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One operation that can be run to make values, now or again."""

    operation: int
    needs: int  # values it reads
    makes: int  # values it makes
    time_us: float
    in_place_us: float
    workspace_bytes: int
    other_bytes: int  # of what it makes that is not decided about: a second copy, if it is run again
    overwrites: int  # the value it may take over, 0 if none
    state_bytes: int  # of the generator, kept from its first run on if it is run again
    rank: int  # place in the forward pass, to run what is run again in that order

    @property
    def least_us(self) -> float:
        """What it takes at best: a run that may overwrite an input may have to, or may not be able to."""
        return min(self.time_us, self.in_place_us) if self.overwrites else self.time_us


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One of the model's own operations in its place, and the other ways to do the same."""

    ways: tuple[Way, ...]  # the model's own first
    before_bytes: int  # live before it runs, without values
    during_bytes: int  # live while it runs, without values and workspace


class Problem:
    """A graph and its costs, prepared for searching."""

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        *,
        optimizer: OptimizerMemory | None = None,
        loss: LossMemory | None = None,
        granularity_bytes: int = 1,
        runs_again: bool = True,
    ) -> None:
        """`runs_again=False`: the model's own operations run once; only alternatives make values again."""
        self.runs_again = runs_again
        self.graph = graph
        self.costs = costs
        self.optimizer = optimizer or OptimizerMemory()
        self.loss = loss
        self._batch_bytes = 0 if loss is None else loss.batch_bytes
        self.granularity_bytes = granularity_bytes
        self._change_at_loss_bytes = 0  # from the end of the forward pass to the start of the backward pass
        if loss is not None:
            self._change_at_loss_bytes = loss.lasting_bytes - sum(map(self._rounded, graph.returned_alone))
        self.storages = _decided(graph)  # by number of a value
        self.bit = {storage: 1 << number for number, storage in enumerate(self.storages)}
        self.sizes = [self._rounded(storage) for storage in self.storages]
        self._taken = dict(_taken_for_certain(graph, self.bit))
        self._made_by = {each: place for place, op in enumerate(graph.operations) for each in op.outputs}
        self.makers = self._makers()
        self.packers = self._packers()
        self.forward, self.backward = self._turns()
        self.first_made, self.last_read = self._forward_lives()
        self.rank_of = [self._rank_of(number) for number in range(len(self.storages))]
        ending = {*graph.resident, *graph.held}
        self.end_bytes = sum(map(self._rounded, ending)) + self.optimizer.state_bytes + self.optimizer.workspace_bytes
        self.end_bytes += self._batch_bytes + self._change_at_loss_bytes
        self.loss_bytes = self._level_at_loss(loss)  # live while the loss runs, without values; 0: it is not outside
        self.written_back = self._bits(graph.written_back)
        self.gain_in_place_us = sum(
            max(way.time_us - way.least_us for way in turn.ways) for turn in (*self.forward, *self.backward)
        )
        self.kept_from_us = dict(self._kept_from())
        self.own_time_us = sum(
            (costs.time_us if operation.overwrites is None else costs.in_place_us)[index]
            for index, operation in enumerate(graph.operations)
        )

    @property
    def least_own_us(self) -> float:
        """What all turns take beyond the eager run if each goes its first way and may overwrite what it can.

        What is kept costs its turn of the forward pass `kept_from_us`; those of the backward pass are at their best.
        """
        forward_us = sum(turn.ways[0].time_us for turn in self.forward) - sum(self.kept_from_us.values())
        backward_us = sum(
            turn.ways[0].time_us - max(way.time_us - way.least_us for way in turn.ways) for turn in self.backward
        )
        return forward_us + backward_us - self.own_time_us

    def size_of(self, values: int) -> int:
        return sum(self.sizes[number] for number in numbers(values))

    @property
    def not_made_again(self) -> int:
        """Values that must be kept while they are read, because no way makes them again."""
        return sum(1 << n for n, ways in enumerate(self.makers) if not ways and n not in self.packers)

    def _level_at_loss(self, loss: LossMemory | None) -> int:
        """See Note [Loss outside] in `ir.py`."""
        if loss is None or not self.backward:
            return 0
        handed_in_bytes = sum(map(self._rounded, self.graph.tangents)) + self._change_at_loss_bytes
        return self.backward[0].before_bytes - handed_in_bytes + loss.working_bytes

    def _rounded(self, storage: int) -> int:
        size_bytes = self.graph.storages[storage].size_bytes
        return -(-size_bytes // self.granularity_bytes) * self.granularity_bytes

    def _bits(self, storages: Sequence[int]) -> int:
        total = 0
        for storage in storages:
            total |= self.bit.get(storage, 0)
        return total

    def way(self, index: int) -> Way:
        operation = self.graph.operation(index)
        taken = self.graph.takes_over(operation)
        overwrites = 0 if taken is None else self.bit.get(taken, 0)
        in_place_us = self.costs.in_place_us[index]
        return Way(
            operation=index,
            needs=self._bits(operation.inputs),
            makes=self._bits(operation.outputs),
            time_us=in_place_us if index in self._taken else self.costs.time_us[index],
            in_place_us=in_place_us,
            workspace_bytes=self.costs.workspace_bytes[index],
            other_bytes=sum(self._rounded(each) for each in operation.outputs if each not in self.bit),
            overwrites=overwrites,
            state_bytes=GENERATOR_STATE_BYTES if operation.random else 0,
            rank=self._rank(index),
        )

    def _rank(self, index: int) -> int:
        """Alternatives run where the value they make belongs, smaller forms right after what they are a form of."""
        if index < len(self.graph.operations):
            return 2 * index
        operation = self.graph.operation(index)
        own = [self._made_by[each] for each in operation.outputs if each in self._made_by]
        if own:
            return 2 * min(own)
        return 2 * max((self._made_by.get(each, 0) for each in operation.inputs), default=0) + 1

    def _rank_of(self, number: int) -> int:
        if number in self.packers:
            return self.packers[number].rank
        return self.forward[self.first_made[number]].ways[0].rank

    def _makers(self) -> list[list[Way]]:
        """By value: the ways to make it again, the model's own first. Packed forms cannot be made again."""
        makers: list[list[Way]] = [[] for _ in self.storages]
        packed = {storage for operation in _packing(self.graph) for storage in operation.outputs}
        for index, operation in _all_operations(self.graph):
            is_own = index < len(self.graph.operations)
            if is_own and not self.runs_again:
                continue
            possible = self.costs.time_us[index] < float("inf")
            if possible and operation.phase is Phase.FORWARD and not packed.intersection(operation.outputs):
                way = self.way(index)
                for number in numbers(way.makes):
                    makers[number].append(way)
        return makers

    def _packers(self) -> dict[int, Way]:
        """By number of a packed form: the way that makes it, right after what it reads is first made."""
        start = len(self.graph.operations)
        packing = {id(operation) for operation in _packing(self.graph)}
        ways = [self.way(start + n) for n, each in enumerate(self.graph.alternatives) if id(each) in packing]
        return {next(numbers(way.makes)): way for way in ways if way.makes}

    def _turns(self) -> tuple[list[Turn], list[Turn]]:
        others: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, operation in enumerate(self.graph.alternatives):
            if operation.phase is Phase.BACKWARD:
                others[operation.outputs].append(len(self.graph.operations) + number)
        beside_bytes = self.optimizer.state_bytes + self._batch_bytes
        levels = _levels_without(self.graph, self.bit, beside_bytes, self._change_at_loss_bytes, self._rounded)
        turns: dict[Phase, list[Turn]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
        for index, (operation, (before, during)) in enumerate(zip(self.graph.operations, levels, strict=True)):
            alternatives = others.get(operation.outputs, []) if operation.phase is Phase.BACKWARD else []
            ways = [self._way_instead(each, index) for each in (index, *alternatives)]
            turns[operation.phase].append(Turn(tuple(_worth_trying(ways)), before, during))
        return turns[Phase.FORWARD], turns[Phase.BACKWARD]

    def _way_instead(self, index: int, own: int) -> Way:
        """A way to go at the turn of an operation: what is in place by one and not by the other is its workspace."""
        way = self.way(index)
        beside_bytes = self._taken_bytes(own) - self._taken_bytes(index)
        return dataclasses.replace(way, workspace_bytes=way.workspace_bytes + beside_bytes) if beside_bytes else way

    def _taken_bytes(self, index: int) -> int:
        taken = self._taken.get(index)
        return 0 if taken is None else self._rounded(taken)

    def _forward_lives(self) -> tuple[list[int], list[int]]:
        """By value: the forward turn that makes it and the last that reads it; written-back ones live to the end."""
        made = [-1] * len(self.storages)
        read = [-1] * len(self.storages)
        for place, turn in enumerate(self.forward):
            for number in numbers(turn.ways[0].makes):
                made[number] = read[number] = place
            for number in numbers(turn.ways[0].needs):
                read[number] = place
        for number, packer in self.packers.items():
            inputs = self.graph.operation(packer.operation).inputs
            made[number] = read[number] = max((self._made_by.get(each, 0) for each in inputs), default=0)
        for number, storage in enumerate(self.storages):
            if storage in self.graph.written_back:
                read[number] = len(self.forward) - 1
        return made, read

    def _kept_from(self) -> Iterator[tuple[int, float]]:
        """By value that the last forward turn to read it could write over: what that turn takes more if it is kept."""
        for place, turn in enumerate(self.forward):
            way = turn.ways[0]
            for number in numbers(way.overwrites):
                if self.last_read[number] == place:
                    yield number, way.time_us - way.in_place_us


def numbers(values: int) -> Iterator[int]:
    """The numbers of the values in a set, smallest first."""
    while values:
        lowest = values & -values
        yield lowest.bit_length() - 1
        values ^= lowest


def _worth_trying(ways: Sequence[Way]) -> list[Way]:
    """Without ways that cannot be gone, and those that read as much as another, take as long and need as much."""
    possible = [way for way in ways if way.time_us < float("inf")]
    return [way for way in possible if not any(_is_better(other, way) for other in possible)]


def _is_better(one: Way, other: Way) -> bool:
    if one.needs & ~other.needs or one.overwrites != other.overwrites or one is other:
        return False
    ones, others = (one.time_us, one.workspace_bytes), (other.time_us, other.workspace_bytes)
    return ones != others and ones[0] <= others[0] and ones[1] <= others[1]


def handed_out_together(graph: Graph) -> Graph:
    """The graph as a captured backward runs it: gradients leave it together, at its end.

    What autograd itself does to make a parameter's gradient happens after the last operation,
    and a sum of two gradients is written over the first.
    """
    own = [each for each in graph.operations if each.target != ACCUMULATE]
    gradients = {gradient for _, gradient in graph.trained}
    last = [
        dataclasses.replace(each, overwrites=each.inputs[0], may_overwrite=each.inputs[0])
        if len(each.inputs) == 2 and each.inputs[0] not in gradients
        else each
        for each in graph.operations
        if each.target == ACCUMULATE
    ]
    operations = [dataclasses.replace(each, frame=None, checkpoint=None) for each in (*own, *last)]
    return dataclasses.replace(graph, operations=tuple(operations))


def _all_operations(graph: Graph) -> Iterator[tuple[int, Operation]]:
    yield from enumerate((*graph.operations, *graph.alternatives))


def _packing(graph: Graph) -> list[Operation]:
    """Alternatives that make a smaller form of a value."""
    own = {storage for operation in graph.operations for storage in operation.outputs}
    return [each for each in graph.alternatives if each.phase is Phase.FORWARD and own.isdisjoint(each.outputs)]


def _decided(graph: Graph) -> list[int]:
    """Storages a plan decides about: made by the forward pass, read again, not small, not held."""
    fixed = {*graph.resident, *graph.held, *graph.tangents}
    made = [
        storage
        for _, operation in _all_operations(graph)
        if operation.phase is Phase.FORWARD
        for storage in operation.outputs
        if storage not in fixed
    ]
    made = list(dict.fromkeys(made))
    total_bytes = sum(graph.storages[storage].size_bytes for storage in made)
    packed = {storage for operation in _packing(graph) for storage in operation.outputs}
    small: set[int] = set()
    small_bytes = 0
    for storage in sorted(set(made) - packed, key=lambda each: (graph.storages[each].size_bytes, each)):
        small_bytes += graph.storages[storage].size_bytes
        if small_bytes > _SMALL_SHARE * total_bytes:
            break
        small.add(storage)
    return [storage for storage in made if storage not in small]


def _taken_for_certain(graph: Graph, decided: Container[int]) -> Iterator[tuple[int, int]]:
    """Backward operations and alternatives that take over a gradient which dies there, whatever is planned."""
    last_read = {storage: place for place, each in enumerate(graph.operations) for storage in each.inputs}
    place_of = {each.outputs: place for place, each in enumerate(graph.operations)}
    lasting = {*graph.resident, *graph.held, *graph.tangents}
    for index, each in _all_operations(graph):
        taken = graph.takes_over(each)
        if each.phase is Phase.FORWARD or taken is None or taken in decided or taken in lasting:
            continue
        if last_read[taken] == place_of.get(each.outputs):
            yield index, taken


def _levels_without(
    graph: Graph, decided: Container[int], beside_bytes: int, change_bytes: int, size_of: Callable[[int], int]
) -> Iterator[tuple[int, int]]:
    """By operation: the bytes live before and while it runs, without the values that are decided about.

    `beside_bytes` live all along, `change_bytes` come between the passes.
    """
    last_read: dict[int, int] = {}
    for place, operation in enumerate(graph.operations):
        for storage in (*operation.outputs, *operation.inputs):
            last_read[storage] = place
    forward_made = {each for op in graph.operations if op.phase is Phase.FORWARD for each in op.outputs}
    lasting = {*graph.resident, *graph.held, *forward_made}  # see Note [Small values]
    live_bytes = beside_bytes + sum(size_of(storage) for storage in graph.resident)
    in_forward = True
    for place, operation in enumerate(graph.operations):
        if in_forward and operation.phase is Phase.BACKWARD:
            in_forward = False
            live_bytes += change_bytes + sum(size_of(storage) for storage in graph.tangents)
        before_bytes = live_bytes
        live_bytes += sum(size_of(each) for each in operation.outputs if each not in decided)
        dying = [
            each
            for each in dict.fromkeys((*operation.inputs, *operation.outputs))
            if each not in decided and each not in lasting and last_read[each] == place
        ]
        taken = graph.takes_over(operation)
        in_place_bytes = 0 if taken is None or taken not in dying or taken in graph.tangents else size_of(taken)
        yield before_bytes, live_bytes - in_place_bytes
        live_bytes -= sum(size_of(storage) for storage in dying)
