"""A training step as a loop runs it: what lives from one step to the next.

Note [Kept gradients]
    A loop that does not set gradients to None, or accumulates them over steps, holds all of them when a step begins.
    Autograd then makes each gradient anew, adds it to the one that is there, and lets it go.

Note [Kept outputs]
    A variable of the loop holds what a step returned until the next one returns the same: `outputs = model(batch)`. So
    the old ones live through the next forward pass. Those of a loss alone are small; scores for a whole vocabulary
    are not, and a loop that has them in a variable returns them beside the loss: `return loss, outputs.logits`.

Note [Forward alone]
    An evaluation has no backward pass. What autograd keeps for one is decided by the code that runs: nothing where the
    forward, the loss, or what is around `memfit.estimate` switches gradients off, else all of it to the end.
"""

import dataclasses

from memfit.errors import InvalidInput
from memfit.ir import Compute, Free, Graph, Instruction, Kind, Program

_WORDS = ("none", "kept")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """What a loop does around its steps."""

    gradients: str = "none"  # before a step: "none" (`zero_grad()`), or "kept", see Note [Kept gradients]
    outputs: str = "none"  # of the step before: "none" (`del`), or "kept", see Note [Kept outputs]
    backward: bool = True  # False: a forward pass alone, see Note [Forward alone]

    def __post_init__(self) -> None:
        for name, word in (("gradients", self.gradients), ("outputs", self.outputs)):
            if word not in _WORDS:
                raise InvalidInput(f'{name} are "none" or "kept" before a step, {word!r} was given')

    def around(self, graph: Graph, program: Program) -> tuple[Graph, Program]:
        """Return graph and program of a step in this loop."""
        if self.outputs == "kept":
            graph, program = with_kept_outputs(graph, program)
        return with_kept_gradients(graph, program) if self.gradients == "kept" else (graph, program)


def with_kept_outputs(graph: Graph, program: Program) -> tuple[Graph, Program]:
    """Hold the outputs of the step before until the forward pass has made new ones."""
    old = tuple(graph.storages[each] for each in graph.held if graph.storages[each].kind is Kind.OUTPUT)
    places = range(len(graph.storages), len(graph.storages) + len(old))
    changed = dataclasses.replace(graph, storages=(*graph.storages, *old), resident=(*graph.resident, *places))
    forward = (*program.forward, *(Free(place) for place in places))
    return changed, dataclasses.replace(program, forward=forward)


def with_kept_gradients(graph: Graph, program: Program) -> tuple[Graph, Program]:
    """Hold all gradients from the start, and free each new one where it is complete."""
    made = [gradient for _, gradient in graph.trained]
    first = len(graph.storages)
    kept = tuple(graph.storages[each] for each in made)
    resident = (*graph.resident, *range(first, first + len(kept)))
    held = tuple(each for each in graph.held if each not in {*made})
    changed = dataclasses.replace(graph, storages=(*graph.storages, *kept), resident=resident, held=held)
    return changed, dataclasses.replace(program, backward=tuple(_freeing(graph, program, {*made})))


def _freeing(graph: Graph, program: Program, made: set[int]) -> list[Instruction]:
    """Free each of these storages after the last instruction that touches it."""
    last: dict[int, int] = {}
    for place, instruction in enumerate(program.backward):
        if isinstance(instruction, Compute):
            operation = graph.operation(instruction.operation)
            last |= {each: place for each in (*operation.inputs, *operation.outputs) if each in made}
    frees: dict[int, list[int]] = {}
    for storage, place in last.items():
        frees.setdefault(place, []).append(storage)
    instructions: list[Instruction] = []
    for place, instruction in enumerate(program.backward):
        instructions.append(instruction)
        instructions += [Free(storage) for storage in frees.get(place, ())]
    return instructions
