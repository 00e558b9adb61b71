"""Whether a program can run on a graph: a last look before anything is built from it."""

from collections import Counter
from collections.abc import Sequence

from memfit.errors import InvalidFile
from memfit.ir import ACCUMULATE, Compute, Graph, Instruction, Phase, Program


def check_program(graph: Graph, program: Program) -> None:
    """Refuse a program that reads what is not there, leaves out an operation, or drops a result."""
    count = len(graph.operations) + len(graph.alternatives)
    live = Counter(graph.resident)
    made: set[int] = set()
    for phase, instructions in ((Phase.FORWARD, program.forward), (Phase.BACKWARD, program.backward)):
        if phase is Phase.BACKWARD:
            live.update(graph.tangents)
        _walk(graph, instructions, count, live, made)
    missing = [storage for storage in graph.held if live[storage] < 1]
    undone = [each.name for each in graph.operations if each.target != ACCUMULATE and not made.issuperset(each.outputs)]
    if missing or undone:
        what = undone[0] if undone else graph.storages[missing[0]].name
        raise InvalidFile(f"the program does not belong to this model: it never makes {what!r}; plan again")


def _walk(graph: Graph, instructions: Sequence[Instruction], count: int, live: Counter[int], made: set[int]) -> None:
    for instruction in instructions:
        if not isinstance(instruction, Compute):
            live[instruction.storage] -= 1
            if live[instruction.storage] < 0:
                raise InvalidFile("the program frees what is not there; plan again")
            continue
        if instruction.operation >= count:
            raise InvalidFile(f"the program runs operation {instruction.operation} of {count}; plan again")
        operation = graph.operation(instruction.operation)
        absent = [storage for storage in operation.inputs if live[storage] < 1]
        if absent:
            value = graph.storages[absent[0]].name
            raise InvalidFile(f"the program runs {operation.name!r} when {value!r} is not there; plan again")
        if instruction.in_place:
            if operation.may_overwrite is None:
                raise InvalidFile(f"the program runs {operation.name!r} in place, which it cannot; plan again")
            live[operation.may_overwrite] -= 1
        live.update(operation.outputs)
        made.update(operation.outputs)
