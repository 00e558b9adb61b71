"""A training step as a loop runs it: what lives from one step to the next.

Note [Kept gradients]
    A loop that does not set gradients to None, or accumulates them over steps, holds all of them when a step begins.
    Autograd then makes each gradient anew, adds it to the one that is there, and lets it go.
"""

import dataclasses

from memfit.errors import InvalidInput
from memfit.ir import Compute, Free, Graph, Instruction, Program

_GRADIENTS = ("none", "kept")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """What a loop does around its steps."""

    gradients: str = "none"  # before a step: "none" (`zero_grad()`), or "kept", see Note [Kept gradients]

    def __post_init__(self) -> None:
        if self.gradients not in _GRADIENTS:
            raise InvalidInput(f'gradients are "none" or "kept" before a step, {self.gradients!r} was given')

    def around(self, graph: Graph, program: Program) -> tuple[Graph, Program]:
        """Return graph and program of a step in this loop."""
        return with_kept_gradients(graph, program) if self.gradients == "kept" else (graph, program)


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
