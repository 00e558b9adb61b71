"""Walk a program and tell when every storage comes and goes: what `plan/simulate.py` adds up, one by one.

Note [Lives]
    Moments are numbered as the simulator numbers them: one for each operation that runs, one for the loss if it is
    outside of the model, and one for the optimizer's step if there is one. A life is live from its `start` up to, not
    including, its `stop`. What is dropped and computed again lives twice; what is written over ends where its successor
    starts.
"""

import dataclasses
from collections import defaultdict

from memfit.ir import Compute, Graph, Instruction, LossMemory, OptimizerMemory, Phase, Program


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What happens at one moment."""

    operation: int | None  # None: the loss, or the optimizer's step
    phase: str  # "forward", "loss", "backward" or "optimizer"
    in_place: bool = False
    is_again: bool = False  # an operation of the forward pass that runs in the backward pass


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
    """One stay of a storage in memory, see Note [Lives]."""

    storage: int
    start: int
    stop: int
    is_again: bool  # made by an operation that runs again


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """All that happens in a step."""

    runs: tuple[Run, ...]
    lives: tuple[Life, ...]  # by start; what is there before the step starts at 0


def course_of(
    graph: Graph, program: Program, optimizer: OptimizerMemory | None = None, loss: LossMemory | None = None
) -> Course:
    """Follow a program from its first instruction to its last."""
    walk = _Walk(graph)
    walk.follow(Phase.FORWARD, program.forward)
    if loss is not None:
        walk.runs.append(Run(operation=None, phase="loss"))
        for storage in graph.returned_alone:
            walk.end(storage)
    for storage in graph.tangents:
        walk.begin(storage)
    walk.follow(Phase.BACKWARD, program.backward)
    if optimizer is not None and optimizer != OptimizerMemory():
        walk.runs.append(Run(operation=None, phase="optimizer"))
    return walk.ended()


class _Walk:
    """Where a walk is, and what is live there."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.runs: list[Run] = []
        self._lives: list[Life] = []
        self._open: dict[int, list[tuple[int, bool]]] = defaultdict(list)  # by storage: start and whether again
        for storage in graph.resident:
            self.begin(storage)

    def begin(self, storage: int, *, is_again: bool = False) -> None:
        self._open[storage].append((len(self.runs), is_again))

    def follow(self, phase: Phase, instructions: tuple[Instruction, ...]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Compute):
                self._compute(instruction, phase)
            else:
                self.end(instruction.storage)

    def ended(self) -> Course:
        """What is live now lives to the end."""
        for storage in list(self._open):
            while self._open[storage]:
                self.end(storage)
        lives = sorted(self._lives, key=lambda life: (life.start, life.storage))
        return Course(runs=tuple(self.runs), lives=tuple(lives))

    def _compute(self, instruction: Compute, phase: Phase) -> None:
        operation = self._graph.operation(instruction.operation)
        is_again = phase is Phase.BACKWARD and operation.phase is Phase.FORWARD
        if instruction.in_place and operation.may_overwrite is not None:
            self.end(operation.may_overwrite)
        for storage in operation.outputs:
            self.begin(storage, is_again=is_again)
        run = Run(operation=instruction.operation, phase=phase, in_place=instruction.in_place, is_again=is_again)
        self.runs.append(run)

    def end(self, storage: int) -> None:
        """The newest of two lives ends first: the older one is held by somebody else."""
        start, is_again = self._open[storage].pop()
        if start < len(self.runs):  # a life between two moments is not seen
            self._lives.append(Life(storage, start, len(self.runs), is_again))
