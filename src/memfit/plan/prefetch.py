"""Bring values back from another tier some operations before they are read, where the peak leaves room for that.

A copy that runs beside the computation is over when it is needed if it was asked for early enough. So every one is
moved up in the backward pass, past operations that together take as long as it does, as far as what is live there
leaves room for its value. Copies stay in their order, and none moves past what makes or frees what it reads or makes.
"""

import dataclasses
from collections.abc import Collection, Sequence

from memfit.ir import Compute, Free, Graph, Instruction, Program


def brought_back_early(
    graph: Graph,
    program: Program,
    copies: Collection[int],
    *,
    live_bytes: Sequence[int],
    limit_bytes: int,
    time_us: Sequence[float],
) -> Program:
    """Move copies up in the backward pass of a program.

    Args:
        graph: The graph of the program.
        program: What is to be run.
        copies: The alternatives that bring values back.
        live_bytes: What is live while each run of the backward pass goes on, in their order.
        limit_bytes: What must not be exceeded.
        time_us: What operations, then alternatives, take.

    """
    moments = iter(live_bytes)
    rows: list[_Row] = [(each, next(moments) if isinstance(each, Compute) else 0) for each in program.backward]
    for place in range(len(rows)):
        instruction = rows[place][0]
        if isinstance(instruction, Compute) and instruction.operation in copies:
            _move_up(graph, rows, place, copies, limit_bytes, time_us)
    return dataclasses.replace(program, backward=tuple(each for each, _ in rows))


_Row = tuple[Instruction, int]


def _move_up(
    graph: Graph,
    rows: list[_Row],
    place: int,
    copies: Collection[int],
    limit_bytes: int,
    time_us: Sequence[float],
) -> None:
    copy = rows[place][0]
    assert isinstance(copy, Compute)
    operation = graph.operation(copy.operation)
    own = {*operation.inputs, *operation.outputs}
    size_bytes = sum(graph.storages[each].size_bytes for each in operation.outputs)
    hidden_us, to = 0.0, place
    while to and hidden_us < time_us[copy.operation]:
        above, live_bytes = rows[to - 1]
        if isinstance(above, Free):
            if above.storage in own:
                break
        elif above.operation in copies or own & _touched(graph, above) or live_bytes + size_bytes > limit_bytes:
            break
        else:
            hidden_us += time_us[above.operation]
        to -= 1
    while to < place and isinstance(rows[to][0], Free):
        to += 1  # what was freed there is out of the way
    moved = [(each, live + size_bytes if live else 0) for each, live in rows[to:place]]
    start_bytes = moved[0][1] if moved else rows[place][1]
    rows[to : place + 1] = [(copy, start_bytes), *moved]


def _touched(graph: Graph, run: Compute) -> set[int]:
    operation = graph.operation(run.operation)
    return {*operation.inputs, *operation.outputs}
