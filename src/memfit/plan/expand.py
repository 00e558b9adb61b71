"""From the values that live at each turn of the backward pass to what is run, and what that takes.

Given for every backward turn the set of values that should still be live when it comes, the
rest follows: what a turn needs and is not live is made again, in the order of the forward pass,
by the cheapest way there is; what is not wanted at the next turn is dropped after its last use.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from memfit.ir import Compute, Free, Instruction, Phase, Program
from memfit.plan.problem import Problem, Turn, Way, numbers

_IMPOSSIBLE = float("inf")


@dataclasses.dataclass(slots=True)
class Expansion:
    """What a choice of live values comes to."""

    forward: list[list[Way]]  # by turn: the turn's own, then what is packed
    backward: list[list[Way]]  # by turn: what is made again, then the turn's own
    live: list[int]  # by backward turn: the values that live when it comes
    extra_us: float  # beyond the model's own operations
    forward_peaks: list[int]  # bytes, by forward turn
    peaks: list[int]  # bytes, by backward turn: the highest of its runs
    highest: list[int]  # by backward turn: the operation of that run

    @property
    def peak_bytes(self) -> int:
        return max(max(self.forward_peaks, default=0), max(self.peaks, default=0))

    def over(self, budget_bytes: int) -> int:
        """The area over a budget: what single moves can lower where the peak alone would not show it."""
        return sum(max(0, peak - budget_bytes) for peak in (*self.forward_peaks, *self.peaks))


def expand(problem: Problem, wanted: Sequence[int]) -> Expansion:
    """What runs if `wanted[t]` are the values to have at backward turn t. Never impossible: what is missing is made."""
    return Expander(problem).expand(wanted)


class Expander:
    """Turns sets of live values into runs."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def expand(
        self,
        wanted: Sequence[int],
        made_early: Mapping[int, int] | None = None,
        chosen: Mapping[int, int] | None = None,
    ) -> Expansion:
        """What runs if `wanted[t]` may live on when turn t comes.

        `made_early[t]` is made before turn t, though read later only; `chosen[t]` is the number of the way that
        turn t goes, by default the one that is cheapest there.
        """
        forward = self._forward(wanted[0] if wanted else 0)
        backward = self._backward(wanted, made_early or {}, chosen or {})
        return self._measured(forward, backward)

    def revalued(self, expansion: Expansion) -> Expansion:
        """Return what an expansion of the same graph comes to with the costs of this problem."""
        problem = self._problem
        forward = [
            [self._same(way, turn if number == 0 else None) for number, way in enumerate(ways)]
            for turn, ways in zip(problem.forward, expansion.forward, strict=True)
        ]
        backward = [
            [self._same(way, turn if number == len(ways) - 1 else None) for number, way in enumerate(ways)]
            for turn, ways in zip(problem.backward, expansion.backward, strict=True)
        ]
        return self._measured(forward, backward)

    def _same(self, way: Way, turn: Turn | None) -> Way:
        """The way of the same operation in this problem, at its turn or made again."""
        for own in () if turn is None else turn.ways:
            if own.operation == way.operation:
                return own
        now = self._problem.way(way.operation)
        if turn is None:
            return now
        return dataclasses.replace(
            way,
            time_us=now.time_us,
            in_place_us=now.in_place_us,
            workspace_bytes=max(now.workspace_bytes, way.workspace_bytes),
        )

    def _forward(self, kept: int) -> list[list[Way]]:
        problem = self._problem
        runs = [[turn.ways[0]] for turn in problem.forward]
        for number, packer in problem.packers.items():
            if kept >> number & 1:
                runs[problem.first_made[number]].append(packer)
        return runs

    def _backward(
        self, wanted: Sequence[int], made_early: Mapping[int, int], chosen: Mapping[int, int]
    ) -> list[list[Way]]:
        live = wanted[0] if wanted else 0
        runs = []
        for place, turn in enumerate(self._problem.backward):
            live &= wanted[place]
            way = turn.ways[0]
            if place in chosen:
                way = turn.ways[chosen[place]]
            elif len(turn.ways) > 1:
                way = self._cheapest(turn.ways, live, {})
            missing = (way.needs | made_early.get(place, 0)) & ~live
            again: list[Way] = []
            if missing:
                again = self._again(missing, live)
                live |= _made(again)
            runs.append([*again, way])
        return runs

    def _measured(self, forward: list[list[Way]], backward: list[list[Way]]) -> Expansion:
        """Walk the runs: when each value dies, what is in place, how high it gets."""
        problem = self._problem
        passes = (
            *((turn, ways, True) for turn, ways in zip(problem.forward, forward, strict=True)),
            *((turn, ways, False) for turn, ways in zip(problem.backward, backward, strict=True)),
        )
        read_after = _read_after(forward, backward, problem.written_back)
        lives: list[int] = []
        read_in_backward = _read_first(backward)
        forward_peaks: list[int] = []
        peaks: list[int] = []
        highest: list[int] = []
        live = live_bytes = place = 0
        drawn_again: dict[int, int] = {}  # bytes of generator states by operation
        extra_us = -problem.own_time_us
        for turn, ways, in_forward in passes:
            if not in_forward:
                if not lives:  # new values of buffers go when the forward pass ends
                    live_bytes -= problem.size_of(live & ~read_in_backward)
                    live &= read_in_backward
                    if (
                        problem.loss_bytes and forward_peaks
                    ):  # what it takes goes with the last turn of the forward pass
                        forward_peaks[-1] = max(forward_peaks[-1], problem.loss_bytes + live_bytes)
                lives.append(live)
            peak, high = 0, -1
            own = ways[0] if in_forward else ways[-1]
            level_bytes = turn.during_bytes if in_forward else turn.before_bytes
            for way in ways:
                later = read_after[place]
                place += 1
                if way is own:
                    level_bytes = turn.during_bytes
                in_place = way.overwrites & live & ~later
                made_bytes = problem.size_of(way.makes)
                high_bytes = live_bytes + made_bytes - (problem.size_of(in_place) if in_place else 0)
                if not in_forward and way is not own:
                    high_bytes += way.other_bytes + way.state_bytes  # also that in which the generator is left
                    drawn_again[way.operation] = way.state_bytes
                if level_bytes + high_bytes + way.workspace_bytes > peak:
                    peak, high = level_bytes + high_bytes + way.workspace_bytes, way.operation
                extra_us += way.in_place_us if in_place else way.time_us
                live_bytes += made_bytes - problem.size_of(way.makes & live)
                live |= way.makes
                dead = live & ~later
                if dead:
                    live_bytes -= problem.size_of(dead)
                    live &= later
            (forward_peaks if in_forward else peaks).append(peak)
            if not in_forward:
                highest.append(high)
        state_bytes = sum(drawn_again.values())
        if state_bytes:
            forward_peaks, peaks = ([peak + state_bytes for peak in each] for each in (forward_peaks, peaks))
        return Expansion(forward, backward, lives, extra_us, forward_peaks, peaks, highest)

    def _cheapest(self, ways: Sequence[Way], live: int, costs: dict[int, float]) -> Way:
        return min(ways, key=lambda way: way.time_us + self._cost(way.needs & ~live, live, costs))

    def _again(self, missing: int, live: int) -> list[Way]:
        """The ways to run, in the order of the forward pass, so that `missing` is there."""
        problem = self._problem
        chosen: dict[int, Way] = {}
        costs: dict[int, float] = {}
        waiting = missing
        have = live
        while waiting:
            number = waiting.bit_length() - 1
            waiting ^= 1 << number
            if have >> number & 1:
                continue
            ways = problem.makers[number]
            way = ways[0] if len(ways) == 1 else self._cheapest(ways, live, costs)
            chosen[way.operation] = way
            have |= way.makes | 1 << number
            waiting |= way.needs & ~have
        return sorted(chosen.values(), key=lambda way: (way.rank, way.operation))

    def cost(self, missing: int, live: int) -> float:
        """About what it takes, in microseconds, to make values again while others live."""
        return self._cost(missing & ~live, live, {})

    def _cost(self, missing: int, live: int, costs: dict[int, float]) -> float:
        """About what it takes to have `missing`; shared parts are counted twice."""
        problem = self._problem
        for number in numbers(self._ancestors(missing, live, costs)):  # what is read has a lower number
            ways = problem.makers[number]  # none for packed forms: if not live they are not to be had
            costs[number] = min(
                (
                    way.time_us + sum(costs.get(each, _IMPOSSIBLE) for each in numbers(way.needs & ~live))
                    for way in ways
                ),
                default=_IMPOSSIBLE,
            )
        return sum(costs[number] for number in numbers(missing))

    def _ancestors(self, missing: int, live: int, known: dict[int, float]) -> int:
        """What has to be there for `missing` and is not, itself included."""
        found = 0
        waiting = missing
        while waiting:
            number = waiting.bit_length() - 1
            waiting ^= 1 << number
            if number in known:
                continue
            found |= 1 << number
            for way in self._problem.makers[number]:
                waiting |= way.needs & ~live & ~found
        return found


def _made(ways: list[Way]) -> int:
    made = 0
    for way in ways:
        made |= way.makes
    return made


def _read_after(forward: list[list[Way]], backward: list[list[Way]], written_back: int) -> list[int]:
    """By run: the values that are read after it, before they are made again."""
    after: list[int] = []
    reads = 0
    for runs in (backward, forward):
        if runs is forward:
            reads |= written_back
        for ways in reversed(runs):
            for way in reversed(ways):
                after.append(reads)
                reads = reads & ~way.makes | way.needs
    after.reverse()
    return after


def _read_first(backward: list[list[Way]]) -> int:
    """The values that the backward pass reads before it makes them."""
    reads = 0
    for ways in reversed(backward):
        for way in reversed(ways):
            reads = reads & ~way.makes | way.needs
    return reads


def program_of(problem: Problem, expansion: Expansion) -> Program:
    """Write an expansion down as a program: every storage is freed right after its last use."""
    graph = problem.graph
    lasting = {*graph.resident, *graph.held}
    read_later: set[int] = set()
    passes: list[tuple[Instruction, ...]] = []
    for runs in (expansion.backward, expansion.forward):
        reverse: list[Instruction] = []
        if runs is expansion.forward:
            reverse += [Free(each) for each in graph.written_back if each not in read_later and each not in lasting]
            read_later.update(graph.written_back)
        for way in reversed([way for ways in runs for way in ways]):
            operation = graph.operation(way.operation)
            touched = dict.fromkeys((*operation.outputs, *operation.inputs))
            dying = [each for each in touched if each not in read_later and each not in lasting]
            if runs is expansion.backward and operation.phase is Phase.FORWARD:
                dying += [each for each in operation.outputs if each in lasting]  # a second copy of an output
            taken = graph.takes_over(operation)
            in_place = taken in dying and taken not in graph.tangents
            reverse += [Free(each) for each in dying if not (in_place and each == taken)]
            reverse.append(Compute(way.operation, in_place))
            read_later.difference_update(operation.outputs)
            read_later.update(operation.inputs)
        passes.append(tuple(reversed(reverse)))
    return Program(graph_digest=graph.digest(), forward=passes[1], backward=passes[0])
