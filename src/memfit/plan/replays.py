"""Memory of the states of generators, for draws that are made again; see Note [Replayed draws] in `execute/rng.py`.

A state is kept from the draw to its replay; it counts over the whole step. While a draw is made again, the state in
which the generator is to be left is there, too.
"""

from collections import Counter

from memfit.ir import GENERATOR_STATE_BYTES, Compute, Graph, Operation, Phase, Program


def kept_states_bytes(graph: Graph, program: Program) -> int:
    """Return what the states take that a program keeps."""
    runs = Counter(each.operation for each in (*program.forward, *program.backward) if isinstance(each, Compute))
    again = sum(1 for run, count in runs.items() if count > 1 and graph.operation(run).random)
    return again * GENERATOR_STATE_BYTES


def replay_bytes(operation: Operation, phase: str) -> int:
    """Return what an operation takes beside its workspace where it runs in the backward pass again."""
    is_again = operation.phase is Phase.FORWARD and phase == Phase.BACKWARD
    return GENERATOR_STATE_BYTES if operation.random and is_again else 0
