"""The program of the plain eager run: nothing is planned.

Every operation once, every value freed after its last use, except what the model itself
arranged: inside `torch.utils.checkpoint` values are dropped in the forward pass, and when the
backward pass first needs one, the operations up to the last needed value run again.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

from memfit.ir import Compute, Free, Graph, Instruction, Operation, Phase, Program


def identity_program(graph: Graph) -> Program:
    """What happens when nothing is planned."""
    runs = list(_runs(graph))
    frees = _frees(graph, runs)
    passes: dict[Phase, list[Instruction]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    for place, run in enumerate(runs):
        in_place = graph.operations[run.operation].overwrites is not None
        passes[run.phase].append(Compute(run.operation, in_place))
        passes[run.phase] += [Free(storage) for storage in frees[place]]
    return Program(
        graph_digest=graph.digest(),
        forward=tuple(passes[Phase.FORWARD]),
        backward=tuple(passes[Phase.BACKWARD]),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """One execution of an operation."""

    operation: int
    phase: Phase  # when it runs, which for a second run is not when it belongs
    again: int | None = None  # the checkpoint that is computed again
    frame: int | None = None


def _runs(graph: Graph) -> Iterator[_Run]:
    again = _computed_again(graph)
    done: set[int] = set()
    for position, operation in enumerate(graph.operations):
        checkpoint = operation.checkpoint
        if operation.phase is Phase.BACKWARD and checkpoint is not None and checkpoint not in done:
            done.add(checkpoint)
            yield from (_Run(each, Phase.BACKWARD, checkpoint) for each in again[checkpoint])
        yield _Run(position, operation.phase, frame=operation.frame)


def _computed_again(graph: Graph) -> dict[int, list[int]]:
    """By checkpoint: its forward operations, up to the one that makes the last value its backward needs."""
    again: dict[int, list[int]] = defaultdict(list)
    for position, operation in enumerate(graph.operations):
        if operation.checkpoint is not None and operation.phase is Phase.FORWARD:
            again[operation.checkpoint].append(position)
    for checkpoint, positions in again.items():
        needed = _needed_inside(graph, checkpoint)
        while positions and needed.isdisjoint(graph.operations[positions[-1]].outputs):
            positions.pop()
    return again


def _needed_inside(graph: Graph, checkpoint: int) -> set[int]:
    return {
        storage
        for operation in graph.operations
        if operation.phase is Phase.BACKWARD and operation.checkpoint == checkpoint
        for storage in operation.inputs
    }


def _frees(graph: Graph, runs: list[_Run]) -> dict[int, list[int]]:
    """By place in `runs`: the storages that die there.

    A storage that is made twice lives twice: what a checkpoint computes again is for its own
    backward, and what others read is the first.
    """
    kept = {*graph.resident, *graph.held}
    last_use: dict[tuple[int, int | None], int] = {}
    overwritten: set[tuple[int, int | None]] = set()
    made_again: set[tuple[int | None, int]] = {
        (run.again, storage)
        for run in runs
        if run.again is not None
        for storage in graph.operations[run.operation].outputs
    }
    for place, run in enumerate(runs):
        operation = graph.operations[run.operation]
        for storage in (*operation.inputs, *operation.outputs):
            life = (storage, _generation(run, operation, storage, made_again))
            if storage not in kept or life[1] is not None:
                last_use[life] = place
            if storage == operation.overwrites:
                overwritten.add(life)
    end_of_forward = max((place for place, run in enumerate(runs) if run.phase is Phase.FORWARD), default=0)
    frees: dict[int, list[int]] = defaultdict(list)
    for life, place in last_use.items():
        if life not in overwritten:
            end = max(place, end_of_forward) if life[0] in graph.written_back else _end_of_frame(runs, place)
            frees[end].append(life[0])
    return frees


def _generation(run: _Run, operation: Operation, storage: int, made_again: set[tuple[int | None, int]]) -> int | None:
    """Which life of a storage a run touches: None for the first, else the checkpoint of the second."""
    if operation.phase is Phase.FORWARD and run.again is None:
        return None
    checkpoint = operation.checkpoint
    return checkpoint if (checkpoint, storage) in made_again else None


def _end_of_frame(runs: list[_Run], place: int) -> int:
    """See Note [Frames] in `ir.py`."""
    frame = runs[place].frame
    while frame is not None and place + 1 < len(runs) and runs[place + 1].frame == frame:
        place += 1
    return place
