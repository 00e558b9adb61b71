"""A backward pass in which gradients are used as soon as they are complete, as the simulator sees it.

Note [Gone at once]
    A gradient that is added to one that exists, or that its parameter is updated from inside the pass, is gone
    right after. For the simulator that is an operation which reads it: it stands where autograd accumulates in
    the eager run, and where a captured pass hands over (Note [Handing over] in `execute/handover.py`), so when the
    gradient is complete and nothing reads the parameter any more.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from memfit.ir import ACCUMULATE, Compute, Free, Graph, Instruction, Operation, Phase, Program
from memfit.plan.simulate import simulate

_UPDATE = "memfit.update"


def peak_with_updates(
    graph: Graph, program: Program, workspace_bytes: Sequence[int], *, update_bytes: int, granularity_bytes: int
) -> int:
    """The peak of a program, see Note [Gone at once]; each update needs `update_bytes` while it runs."""
    extended, updating, workspaces = with_updates(graph, program, workspace_bytes, update_bytes=update_bytes)
    return simulate(extended, updating, workspace_bytes=workspaces, granularity_bytes=granularity_bytes).peak_bytes


def with_updates(
    graph: Graph, program: Program, workspace_bytes: Sequence[int], *, update_bytes: int, label: str = "update"
) -> tuple[Graph, Program, list[int]]:
    """Graph, program and workspaces of a pass that uses gradients at once, see Note [Gone at once]."""
    updates = _update_operations(graph, label)
    first = len(graph.operations) + len(graph.alternatives)
    numbered = {gradient: first + number for number, gradient in enumerate(updates)}
    extended = dataclasses.replace(graph, alternatives=(*graph.alternatives, *updates.values()))
    updating = dataclasses.replace(program, backward=tuple(_with_updates(graph, program.backward, numbered)))
    return extended, updating, [*workspace_bytes, *(update_bytes for _ in updates)]


def without_gradients_held(graph: Graph) -> Graph:
    """The graph for a planner that need not hold gradients to the end."""
    gradients = {gradient for _, gradient in graph.trained}
    return dataclasses.replace(graph, held=tuple(each for each in graph.held if each not in gradients))


def with_gradients_held(graph: Graph, program: Program) -> Program:
    """What runs: a program of `without_gradients_held(graph)` that leaves it to the one who takes gradients."""
    gradients = {gradient for _, gradient in graph.trained}
    backward = tuple(each for each in program.backward if not (isinstance(each, Free) and each.storage in gradients))
    return dataclasses.replace(program, backward=backward, graph_digest=graph.digest())


def added_early(graph: Graph, program: Program) -> Program:
    """A captured pass as it runs when gradients are taken: sums are made when their last part is there."""
    sums = [each for each in program.backward if _is_sum(graph, each)]
    lasting = {*graph.resident, *graph.held, *graph.tangents}
    parts = {part for each in sums for part in _operation(graph, each).inputs} - lasting
    others = [
        each
        for each in program.backward
        if not _is_sum(graph, each) and not (isinstance(each, Free) and each.storage in parts)
    ]
    missing = {
        made for each in (*others, *sums) if isinstance(each, Compute) for made in _operation(graph, each).outputs
    }
    backward: list[Instruction] = []
    for each in others:
        backward.append(each)
        if not isinstance(each, Compute):
            continue
        missing.difference_update(_operation(graph, each).outputs)
        for ready in [one for one in sums if missing.isdisjoint(_operation(graph, one).inputs)]:
            operation = _operation(graph, ready)
            taken = operation.may_overwrite if isinstance(ready, Compute) and ready.in_place else None
            backward += [ready, *(Free(part) for part in operation.inputs if part in parts and part != taken)]
            missing.difference_update(operation.outputs)
            sums.remove(ready)
    return dataclasses.replace(program, backward=(*backward, *sums))


def _with_updates(graph: Graph, backward: Sequence[Instruction], updates: dict[int, int]) -> list[Instruction]:
    complete: dict[int, int] = {}  # by gradient or parameter: the place where it is made, or read, for the last time
    parameters = {gradient: parameter for parameter, gradient in graph.trained}
    for place, each in enumerate(backward):
        if isinstance(each, Compute):
            operation = _operation(graph, each)
            complete.update((made, place) for made in operation.outputs if made in parameters)
            complete.update((read, place) for read in operation.inputs if read in graph.resident)
    due: dict[int, list[int]] = defaultdict(list)
    for gradient, parameter in parameters.items():
        if gradient in complete:
            place = max(complete[gradient], complete.get(parameter, 0))
            due[_end_of_call(graph, backward, place)].append(gradient)
    result: list[Instruction] = []
    for place, each in enumerate(backward):
        result.append(each)
        for gradient in due.get(place, []):
            result += [Compute(updates[gradient]), Free(gradient)]
    return result


def _end_of_call(graph: Graph, backward: Sequence[Instruction], place: int) -> int:
    """The last instruction that belongs to an operation: the rest of its frame, and what is freed after it."""
    frame = _operation(graph, backward[place]).frame
    for following in range(place + 1, len(backward)):
        each = backward[following]
        if isinstance(each, Compute) and (frame is None or _operation(graph, each).frame != frame):
            return following - 1
    return len(backward) - 1


def _update_operations(graph: Graph, label: str) -> dict[int, Operation]:
    """By gradient; what gets no gradient of its own in the pass has none."""
    return {
        gradient: Operation(
            name=f"{label} {graph.storages[parameter].name}",
            target=_UPDATE,
            phase=Phase.BACKWARD,
            inputs=(parameter, gradient),
            outputs=(),
        )
        for parameter, gradient in graph.trained
    }


def _is_sum(graph: Graph, instruction: Instruction) -> bool:
    return isinstance(instruction, Compute) and graph.operation(instruction.operation).target == ACCUMULATE


def _operation(graph: Graph, instruction: Instruction) -> Operation:
    assert isinstance(instruction, Compute)
    return graph.operation(instruction.operation)
