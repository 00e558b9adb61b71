"""One program for each region of a step that could not be captured whole.

Note [Whole peak]
    The step was seen once with every region running its baseline (the unplanned program, as a rule), and cut into
    stretches where the passes of regions begin and end. Another program changes what its region adds, and nothing else:
    - in its own passes, the live bytes are those at the pass's start and what its program adds to them;
    - between its passes, they are what they were, and what the program keeps more or less than the baseline.
    Both are sums over regions, so one linear row a stretch says that the whole step is under the budget.

Note [Shared values]
    What a region is given and what it returns may be held by others too. The step that was seen shows it: a value
    that is gone when the region's backward pass has ended was held by nobody else, and a program that reads it there
    frees it after its last use; one that is still there costs the region nothing.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from memfit.ir import Compute, Free, Graph, Instruction, Kind, Phase, Program
from memfit.plan.linear import LinearProgram
from memfit.plan.replays import kept_states_bytes, replay_bytes

_MIB = 2**20
_MOST_TRIES = 4  # of a solver that is right up to a tolerance


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What holds the arguments and results of a region beside itself, see Note [Shared values]."""

    there: frozenset[int] = frozenset()  # storages in memory when the baseline's backward pass begins
    left: frozenset[int] = frozenset()  # and when it has ended


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """What a program of a region adds to the step around it, see Note [Whole peak]."""

    forward_bytes: int  # at most, to what lives when its forward pass begins
    kept_bytes: int  # between its passes, to what the baseline keeps
    backward_bytes: int  # at most, to what lives when its backward pass begins in the step that was seen


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to run a region."""

    footprint: Footprint
    extra_us: float  # of one call


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A part of the step in which nothing begins or ends, of the step in which every region runs its baseline."""

    live_bytes: int  # at most; of a pass of a region: when it begins
    waiting: Mapping[int, int]  # by region: how many of its calls are between their passes
    running: tuple[int, Phase] | None = None  # the region whose pass it is


Choice = tuple[int, ...]  # by region: which option
Options = Sequence[Sequence[Option]]  # by region


def footprint(
    graph: Graph,
    program: Program,
    baseline: Program,
    *,
    workspace_bytes: Sequence[int],
    granularity_bytes: int = 1,
    around: Surroundings,
    baseline_graph: Graph | None = None,
) -> Footprint:
    """What `program` adds to a step in which its region ran `baseline`.

    The two may be written for different graphs of one region, whose storages have the same numbers.
    """
    walker = _Walker(graph, workspace_bytes, granularity_bytes)
    states_bytes = kept_states_bytes(graph, program)
    forward_bytes, end_bytes = walker.walk(program.forward)
    seen = baseline_graph or graph
    no_workspaces = [0] * (len(seen.operations) + len(seen.alternatives))
    _, baseline_end_bytes = _Walker(seen, no_workspaces, granularity_bytes).walk(baseline.forward)
    baseline_end_bytes += kept_states_bytes(seen, baseline)
    shared = shared_storages(graph)
    reads = _reads(graph, program.backward) & shared
    baseline_reads = _reads(seen, baseline.backward) & shared
    newly_kept = reads - baseline_reads - around.there
    no_longer_kept = baseline_reads - reads - around.left
    kept_bytes = states_bytes + end_bytes - baseline_end_bytes + walker.size_of(newly_kept)
    held_outside = around.left.intersection(graph.tangents)
    backward = [each for each in program.backward if not (isinstance(each, Free) and each.storage in held_outside)]
    backward_bytes, _ = walker.walk(_with_frees(graph, backward, reads - around.left), Phase.BACKWARD)
    return Footprint(
        forward_bytes=states_bytes + forward_bytes,
        kept_bytes=kept_bytes,
        backward_bytes=kept_bytes - walker.size_of(no_longer_kept) + backward_bytes,
    )


def shared_storages(graph: Graph) -> frozenset[int]:
    """Arguments and results of a region: what it shares with the step around it."""
    made = {each for operation in graph.operations if operation.phase is Phase.FORWARD for each in operation.outputs}
    given = {each for each in graph.resident if graph.storages[each].kind is Kind.BATCH}
    return frozenset(given | made.intersection(graph.held))


def kept_bytes(graph: Graph, program: Program) -> int:
    """What a program keeps from its forward to its backward pass, results left out."""
    walker = _Walker(graph, [0] * (len(graph.operations) + len(graph.alternatives)), 1)
    _, end_bytes = walker.walk(program.forward)
    results = shared_storages(graph).difference(graph.resident)
    return end_bytes - walker.size_of(results)


def without_worse(options: Sequence[Option]) -> list[int]:
    """The options that no other is as good as in everything."""
    chosen: list[int] = []
    for index in sorted(range(len(options)), key=lambda each: (_figures(options[each]), each)):
        if not any(_as_good(options[other], options[index]) for other in chosen):
            chosen.append(index)
    return sorted(chosen)


def whole_peak_bytes(options: Options, stretches: Iterable[Stretch], choice: Choice) -> int:
    """The peak of the step with one option a region."""
    footprints = [options[region][number].footprint for region, number in enumerate(choice)]
    return max(
        stretch.live_bytes
        + sum(count * footprints[region].kept_bytes for region, count in stretch.waiting.items())
        + (0 if stretch.running is None else _running_bytes(footprints[stretch.running[0]], stretch.running[1]))
        for stretch in stretches
    )


def choose(
    options: Options,
    calls: Sequence[int],
    stretches: Sequence[Stretch],
    budget_bytes: int,
    *,
    time_limit_s: float = 10.0,
) -> Choice | None:
    """The options that add least time and keep the whole step under the budget; None if there are none."""
    limit_bytes = budget_bytes
    for _ in range(_MOST_TRIES):
        program = LinearProgram()
        variables = [
            [program.variable(calls[region] * option.extra_us) for option in each]
            for region, each in enumerate(options)
        ]
        _one_each(program, variables)
        for stretch in _binding(stretches):
            program.at_most(_terms(options, variables, stretch), (limit_bytes - stretch.live_bytes) / _MIB)
        choice = _choice(program, variables, time_limit_s)
        if choice is None:
            return None
        excess_bytes = whole_peak_bytes(options, stretches, choice) - budget_bytes
        if excess_bytes <= 0:
            return choice
        limit_bytes -= excess_bytes
    return None


def smallest(options: Options, stretches: Sequence[Stretch], *, time_limit_s: float = 10.0) -> Choice:
    """The options with which the peak of the whole step is lowest."""
    unplanned: Choice = (0,) * len(options)
    scale_bytes = whole_peak_bytes(options, stretches, unplanned)
    program = LinearProgram()
    peak = program.variable(1.0, binary=False)
    variables = [[program.variable() for _ in each] for each in options]
    _one_each(program, variables)
    for stretch in _binding(stretches):
        terms = _terms(options, variables, stretch) | {peak: -scale_bytes / _MIB}
        program.at_most(terms, -stretch.live_bytes / _MIB)
    return _choice(program, variables, time_limit_s) or unplanned


class _Walker:
    """Adds up bytes along a pass, from 0 at its start."""

    def __init__(self, graph: Graph, workspace_bytes: Sequence[int], granularity_bytes: int) -> None:
        self._graph = graph
        self._workspace_bytes = workspace_bytes
        self._sizes = [-(-each.size_bytes // granularity_bytes) * granularity_bytes for each in graph.storages]

    def size_of(self, storages: Iterable[int]) -> int:
        return sum(self._sizes[each] for each in storages)

    def walk(self, instructions: Sequence[Instruction], phase: Phase = Phase.FORWARD) -> tuple[int, int]:
        """The most that was live, and what is at the end."""
        now_bytes = peak_bytes = 0
        for instruction in instructions:
            if not isinstance(instruction, Compute):
                now_bytes -= self._sizes[instruction.storage]
                continue
            operation = self._graph.operation(instruction.operation)
            if instruction.in_place and operation.may_overwrite is not None:
                now_bytes -= self._sizes[operation.may_overwrite]
            now_bytes += self.size_of(operation.outputs)
            workspace_bytes = self._workspace_bytes[instruction.operation] + replay_bytes(operation, phase)
            peak_bytes = max(peak_bytes, now_bytes + workspace_bytes)
        return peak_bytes, now_bytes


def _reads(graph: Graph, instructions: Iterable[Instruction]) -> frozenset[int]:
    runs = [graph.operation(each.operation) for each in instructions if isinstance(each, Compute)]
    return frozenset(itertools.chain.from_iterable(operation.inputs for operation in runs))


def _with_frees(graph: Graph, instructions: Sequence[Instruction], storages: Iterable[int]) -> list[Instruction]:
    """The same pass, in which these storages are freed after their last use."""
    waiting = set(storages)
    reverse: list[Instruction] = []
    for instruction in reversed(instructions):
        if isinstance(instruction, Compute):
            last = [each for each in graph.operation(instruction.operation).inputs if each in waiting]
            reverse += [Free(each) for each in last]
            waiting.difference_update(last)
        reverse.append(instruction)
    return list(reversed(reverse))


def _figures(option: Option) -> tuple[float, int, int, int]:
    own = option.footprint
    return option.extra_us, own.kept_bytes, own.backward_bytes, own.forward_bytes


def _as_good(one: Option, other: Option) -> bool:
    return all(first <= second for first, second in zip(_figures(one), _figures(other), strict=True))


def _running_bytes(footprint: Footprint, phase: Phase) -> int:
    return footprint.forward_bytes if phase is Phase.FORWARD else footprint.backward_bytes


def _one_each(program: LinearProgram, variables: Sequence[Sequence[int]]) -> None:
    for each in variables:
        program.at_least(dict.fromkeys(each, 1.0), 1.0)
        program.at_most(dict.fromkeys(each, 1.0), 1.0)


def _binding(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Of stretches that differ in bytes alone, the highest."""
    highest: dict[object, Stretch] = {}
    for stretch in stretches:
        key = (frozenset(stretch.waiting.items()), stretch.running)
        if key not in highest or highest[key].live_bytes < stretch.live_bytes:
            highest[key] = stretch
    return list(highest.values())


def _terms(options: Options, variables: Sequence[Sequence[int]], stretch: Stretch) -> dict[int, float]:
    terms: dict[int, float] = {}
    for region, each in enumerate(options):
        count = stretch.waiting.get(region, 0)
        for variable, option in zip(variables[region], each, strict=True):
            own_bytes = count * option.footprint.kept_bytes
            if stretch.running is not None and stretch.running[0] == region:
                own_bytes += _running_bytes(option.footprint, stretch.running[1])
            if own_bytes:
                terms[variable] = own_bytes / _MIB
    return terms


def _choice(program: LinearProgram, variables: Sequence[Sequence[int]], time_limit_s: float) -> Choice | None:
    values = program.solve(time_limit_s=time_limit_s).values
    if values is None:
        return None
    return tuple(max(range(len(each)), key=lambda number: values[each[number]]) for each in variables)
