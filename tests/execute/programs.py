"""Programs made from graphs by simple rules, and models that run them."""

import copy
from collections.abc import Callable, Collection

from torch import nn

from memfit.capture.alternatives import extend
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.execute.attach import attach
from memfit.execute.compiled import CompiledCall
from memfit.ir import ACCUMULATE, Compute, Free, Graph, Instruction, Phase, Program
from memfit.ops.registry import find_lean_operator

Planner = Callable[[Graph], Program]


def planned(model: nn.Module, sample, planner: Planner, *, techniques=(), backward_from="auto") -> nn.Module:
    """A copy of a model that runs the program `planner` makes of its graph."""

    def compile_call(module, args, kwargs):
        call = Sample(args, kwargs)
        with traced(module, call, backward_from=backward_from, with_hooks=False) as joint:
            extend(joint, techniques)
            graph = lower(joint)
            return CompiledCall(joint, graph, planner(graph))

    twin = copy.deepcopy(model)
    example = Sample.of(sample)
    attach(twin, compile_call).capture(example.args, dict(example.kwargs))
    return twin


def decided(graph: Graph) -> list[int]:
    """The storages a program may keep or drop: made in the forward pass, read in the backward pass."""
    made = {
        storage for operation in graph.operations if operation.phase is Phase.FORWARD for storage in operation.outputs
    }
    read = {
        storage for operation in graph.operations if operation.phase is Phase.BACKWARD for storage in operation.inputs
    }
    return sorted(made & read - {*graph.held})


def keeping(kept: Callable[[int], bool] = lambda _: False, **choices) -> Planner:
    """Keep what `kept` says, compute the rest again where the backward pass needs it."""
    return lambda graph: lazy_program(graph, {each for each in decided(graph) if kept(each)}, **choices)


def lazy_program(
    graph: Graph,
    kept: Collection[int],
    *,
    forgotten: Callable[[int], bool] = lambda _: False,
    in_place: Callable[[int], bool] = lambda _: True,
    lean: bool = False,
) -> Program:
    """Keep only `kept` from the forward pass; make the rest again when the backward pass first needs it.

    What is `forgotten` is made again for every backward operation that reads it. Where the input
    of an operation dies, `in_place` says by operation whether it is overwritten. `lean` takes every
    alternative there is that is certain to be exact: smaller forms are kept, values and gradients are made from them.
    """
    runs = _Runs(graph, forgotten)
    for index, operation in enumerate(graph.operations):
        if operation.phase is Phase.FORWARD:
            runs.compute(index)
            if lean:
                runs.make_forms(index)
    runs.turn_around({*kept, *graph.held})
    if lean:
        runs.take_alternatives()
    for index, operation in enumerate(graph.operations):
        if operation.phase is Phase.BACKWARD:
            runs.turn(index)
    return _with_frees(graph, runs.passes, in_place)


class _Runs:
    """What is computed when, and what could be read there."""

    def __init__(self, graph: Graph, forgotten: Callable[[int], bool]) -> None:
        self.passes: dict[Phase, list[int]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
        self._graph = graph
        self._forgotten = forgotten
        self._phase = Phase.FORWARD
        self._live = {*graph.resident}
        self._kept: set[int] = set()
        self._forms: set[int] = set()
        self._instead: dict[tuple[int, ...], int] = {}
        self._maker = {
            storage: index for index, operation in enumerate(graph.operations) for storage in operation.outputs
        }

    def make_forms(self, index: int) -> None:
        """Make the smaller forms of what an operation has just made."""
        for number, other in enumerate(self._graph.alternatives, len(self._graph.operations)):
            fresh = not self._live.intersection(other.outputs) and self._maker.keys().isdisjoint(other.outputs)
            made = {*other.inputs}.intersection(self._graph.operations[index].outputs)
            if other.phase is Phase.FORWARD and fresh and made and self._live.issuperset(other.inputs):
                self.compute(number)
                self._forms.update(other.outputs)

    def take_alternatives(self) -> None:
        for number, other in enumerate(self._graph.alternatives, len(self._graph.operations)):
            if other.phase is Phase.BACKWARD and find_lean_operator(other.technique).certain:
                self._instead[other.outputs] = number
            elif other.phase is Phase.FORWARD and not self._forms.intersection(other.outputs):
                self._maker.update(dict.fromkeys(other.outputs, number))

    def turn_around(self, kept: set[int]) -> None:
        self._phase = Phase.BACKWARD
        self._kept = {*kept, *self._forms, *self._graph.resident, *self._graph.tangents}
        self._live = (self._live & kept) | self._kept

    def compute(self, index: int) -> None:
        self.passes[self._phase].append(index)
        self._live.update(self._graph.operation(index).outputs)

    def turn(self, index: int) -> None:
        """Run an operation of the backward pass, and before it what it misses."""
        made: set[int] = set()
        index = self._instead.get(self._graph.operations[index].outputs, index)
        for storage in self._graph.operation(index).inputs:
            self._have(storage, made)
        self.compute(index)
        self._live -= {storage for storage in made - self._kept if self._forgotten(storage)}

    def _have(self, storage: int, made: set[int]) -> None:
        if storage in self._live:
            return
        maker = self._maker[storage]
        for each in self._graph.operation(maker).inputs:
            self._have(each, made)
        self.compute(maker)
        made.update(self._graph.operation(maker).outputs)


def _with_frees(graph: Graph, passes: dict[Phase, list[int]], in_place: Callable[[int], bool]) -> Program:
    """Free every value right after it is read for the last time before it is made again, or never again."""
    lasting = {*graph.resident, *graph.held}
    written: dict[Phase, list[Instruction]] = {}
    read_later: set[int] = set()
    for phase in (Phase.BACKWARD, Phase.FORWARD):
        reverse: list[Instruction] = []
        protected = (*graph.tangents, *(graph.written_back if phase is Phase.FORWARD else ()))
        ends = [each for each in graph.written_back if each not in read_later] if phase is Phase.FORWARD else []
        read_later.update(ends)
        reverse += [Free(each) for each in ends if each not in lasting]
        for index in reversed(passes[phase]):
            operation = graph.operation(index)
            dying = [
                each
                for each in dict.fromkeys((*operation.outputs, *operation.inputs))
                if each not in read_later and each not in lasting
            ]
            over = operation.may_overwrite
            overwritten = over in dying and over not in protected and in_place(index)
            reverse += [Free(each) for each in dying if not (overwritten and each == over)]
            reverse.append(Compute(index, overwritten))
            read_later.difference_update(operation.outputs)
            read_later.update(operation.inputs)
        written[phase] = list(reversed(reverse))
    return Program(
        graph_digest=graph.digest(), forward=tuple(written[Phase.FORWARD]), backward=tuple(written[Phase.BACKWARD])
    )


def computed_again(graph: Graph, program: Program) -> list[str]:
    """Targets of the forward operations that the backward pass runs."""
    operations = [graph.operation(each.operation) for each in program.backward if isinstance(each, Compute)]
    return [each.target for each in operations if each.phase is Phase.FORWARD and each.target != ACCUMULATE]


keep_nothing = keeping()
keep_everything = keeping(lambda _: True)
forget_everything = keeping(forgotten=lambda _: True)
