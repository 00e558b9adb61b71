"""The program of the plain eager run: every operation once, every value freed after its last use."""

from memfit.ir import Compute, Free, Graph, Instruction, Phase, Program


def identity_program(graph: Graph) -> Program:
    """What happens when nothing is planned."""
    last_use = _last_uses(graph)
    passes: dict[Phase, list[Instruction]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    for position, operation in enumerate(graph.operations):
        instructions = passes[operation.phase]
        instructions.append(Compute(position))
        for storage in dict.fromkeys((*operation.inputs, *operation.outputs)):
            if last_use.get(storage) == position and storage != operation.overwrites:
                instructions.append(Free(storage))
    passes[Phase.FORWARD] += [Free(storage) for storage in graph.written_back if storage not in last_use]
    return Program(
        graph_digest=graph.digest(),
        forward=tuple(passes[Phase.FORWARD]),
        backward=tuple(passes[Phase.BACKWARD]),
    )


def _last_uses(graph: Graph) -> dict[int, int]:
    """Position of the last operation that touches each storage which the step itself may free."""
    kept = {*graph.resident, *graph.held, *graph.written_back}
    last_use: dict[int, int] = {}
    for position, operation in enumerate(graph.operations):
        for storage in (*operation.inputs, *operation.outputs):
            if storage not in kept:
                last_use[storage] = position
    return last_use
