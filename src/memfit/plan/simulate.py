"""Walk a program and tell how many bytes are live at every moment of a training step.

Note [What a step is]
    `zero_grad(set_to_none=True)`, forward, backward, optimizer step. Before it: parameters,
    buffers, optimizer state (it exists from the second step on) and the batch. The outputs of
    the model are held to the end, as in `out = model(x); out.loss.backward(); optimizer.step()`.
    Where the loss is known that the caller computes outside of the model, it is one moment between the passes, see
    Note [Loss outside] in `ir.py`, and outputs live as long as the caller holds them.
    The optimizer's step is one moment, the highest of it. Where the optimizer calls a closure for the forward
    and the backward pass, its state is all that it holds meanwhile.
    While an operation runs, its inputs, its outputs and its workspace are live together.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from memfit.ir import (
    Compute,
    Graph,
    Instruction,
    Kind,
    LossMemory,
    OptimizerMemory,
    Phase,
    Program,
)
from memfit.plan.replays import kept_states_bytes, replay_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One operation of the step and the bytes that are live while it runs."""

    label: str  # name of the operation
    phase: str  # "forward", "loss", "backward" or "optimizer"
    module: str
    by_kind: Mapping[Kind, int]

    @property
    def live_bytes(self) -> int:
        return sum(self.by_kind.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The live bytes of a whole training step."""

    moments: tuple[Moment, ...]  # one for every operation that runs, or the start alone
    peak_position: int  # index into moments
    peak_storages: tuple[int, ...]  # what is live at the peak, biggest first; twice what lives twice
    resident_bytes: int  # before the step: parameters, buffers, optimizer state, batch

    @property
    def peak(self) -> Moment:
        return self.moments[self.peak_position]

    @property
    def peak_bytes(self) -> int:
        return self.peak.live_bytes


def simulate(
    graph: Graph,
    program: Program,
    *,
    workspace_bytes: Sequence[int] = (),
    optimizer: OptimizerMemory | None = None,
    loss: LossMemory | None = None,
    granularity_bytes: int = 1,
    library_bytes: int = 0,
) -> Timeline:
    """Run `program` in the mind. `workspace_bytes` is by operation, then by alternative; none means none.

    `granularity_bytes` is what the allocator rounds every storage up to, `library_bytes` what libraries hold for good.
    """
    optimizer = optimizer or OptimizerMemory()
    memory = _Memory(graph, optimizer, granularity_bytes)
    memory.add(Kind.BATCH, 0 if loss is None else loss.batch_bytes)
    memory.add(Kind.WORKSPACE, library_bytes)
    resident_bytes = memory.total_bytes()
    memory.add(Kind.ACTIVATION, kept_states_bytes(graph, program))
    workspaces = workspace_bytes or [0] * (len(graph.operations) + len(graph.alternatives))
    moments = _walk(memory, Phase.FORWARD, program.forward, workspaces)
    if loss is not None:
        moments.append(memory.moment("loss", "loss", "", loss.working_bytes))
        for storage in graph.returned_alone:
            memory.free(storage)
        memory.add(Kind.OUTPUT, loss.lasting_bytes)
    for storage in graph.tangents:
        memory.allocate(storage)
    moments += _walk(memory, Phase.BACKWARD, program.backward, workspaces)
    if optimizer != OptimizerMemory():
        moments.append(memory.moment("step", "optimizer", "", optimizer.workspace_bytes))
    moments = moments or [memory.moment("start", Phase.FORWARD, "", 0)]
    position = max(range(len(moments)), key=lambda index: moments[index].live_bytes)
    return Timeline(
        moments=tuple(moments),
        peak_position=position,
        peak_storages=_live_at(graph, program, position, has_loss=loss is not None),
        resident_bytes=resident_bytes,
    )


class _Memory:
    """Live storages and their bytes by kind."""

    def __init__(self, graph: Graph, optimizer: OptimizerMemory, granularity_bytes: int) -> None:
        self.graph = graph
        self._granularity_bytes = granularity_bytes
        self._by_kind = dict.fromkeys(Kind, 0)
        self._by_kind[Kind.OPTIMIZER] = optimizer.state_bytes
        for storage in graph.resident:
            self.allocate(storage)

    def add(self, kind: Kind, size_bytes: int) -> None:
        """Count what is no storage of the graph."""
        self._by_kind[kind] += size_bytes

    def allocate(self, storage: int) -> None:
        self._by_kind[self.graph.storages[storage].kind] += self._rounded(storage)

    def free(self, storage: int) -> None:
        self._by_kind[self.graph.storages[storage].kind] -= self._rounded(storage)

    def total_bytes(self) -> int:
        return sum(self._by_kind.values())

    def moment(self, label: str, phase: str, module: str, workspace_bytes: int) -> Moment:
        by_kind = dict(self._by_kind)
        by_kind[Kind.WORKSPACE] += workspace_bytes
        return Moment(label=label, phase=phase, module=module, by_kind=by_kind)

    def _rounded(self, storage: int) -> int:
        size_bytes = self.graph.storages[storage].size_bytes
        return -(-size_bytes // self._granularity_bytes) * self._granularity_bytes


def _walk(
    memory: _Memory, phase: Phase, instructions: Sequence[Instruction], workspaces: Sequence[int]
) -> list[Moment]:
    moments = []
    for instruction in instructions:
        if not isinstance(instruction, Compute):
            memory.free(instruction.storage)
            continue
        operation = memory.graph.operation(instruction.operation)
        if instruction.in_place and operation.may_overwrite is not None:
            memory.free(operation.may_overwrite)
        for storage in operation.outputs:
            memory.allocate(storage)
        workspace_bytes = workspaces[instruction.operation] + replay_bytes(operation, phase)
        moments.append(memory.moment(operation.name, phase, operation.module, workspace_bytes))
    return moments


def _live_at(graph: Graph, program: Program, position: int, *, has_loss: bool) -> tuple[int, ...]:
    """The storages that are live at the moment at `position`, biggest first."""
    live = Counter(graph.resident)
    computed = 0
    for phase, instructions in ((Phase.FORWARD, program.forward), (Phase.BACKWARD, program.backward)):
        if phase is Phase.BACKWARD and has_loss:
            if computed == position:
                return _biggest_first(graph, live)
            computed += 1
            live.subtract(graph.returned_alone)
        if phase is Phase.BACKWARD:
            live.update(graph.tangents)
        for instruction in instructions:
            if not isinstance(instruction, Compute):
                live[instruction.storage] -= 1
                continue
            operation = graph.operation(instruction.operation)
            if instruction.in_place and operation.may_overwrite is not None:
                live[operation.may_overwrite] -= 1
            live.update(operation.outputs)
            if computed == position:
                return _biggest_first(graph, live)
            computed += 1
    return _biggest_first(graph, live)


def _biggest_first(graph: Graph, live: Counter[int]) -> tuple[int, ...]:
    return tuple(sorted(live.elements(), key=lambda storage: (-graph.storages[storage].size_bytes, storage)))
