"""Simulate the eager step with tensors saved for the backward pass in a file.

Note [Held by calls]
    Autograd holds nothing in memory then, but Python does. The arguments of a module's call live until the call
    returns, whoever is called inside it: the input of a block lives while all of its layers run. So a value lives, in
    the forward pass, until the last call returns that got it from outside. What a forward keeps in a variable beyond
    its last use is not known here.

Note [Read back]
    A node of autograd brings back all that it saved when it begins, and drops it when it returns; small values stay in
    memory. A checkpoint of the model brings back what it runs again from in the same way, and keeps the state of the
    generator. Outputs that the backward pass does not start from are dropped before it, as `capture/rehearse.py` does;
    those that it starts from are held, and a node that has saved one brings back a second copy.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

from memfit.ir import GENERATOR_STATE_BYTES, Compute, Graph, Operation, Phase
from memfit.plan.identity import identity_program

_SCALAR_BYTES = 8
_SCALARS_BYTES = 64  # of what is in no graph: the gradient of the loss itself, the loss of a model that has none


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpilledPeak:
    """Hold the peak of a step whose saved tensors are in a file."""

    forward_bytes: int  # live at most in the forward pass
    backward_bytes: int
    file_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_bytes, self.backward_bytes)


def spilled_peak(graph: Graph, workspace_bytes: Sequence[int], *, smallest_bytes: int) -> SpilledPeak:
    """Predict the peak of an eager step that keeps saved tensors of `smallest_bytes` and more in a file.

    `workspace_bytes` is by operation. The optimizer's state does not count.
    """
    walk = _Walk(graph, workspace_bytes, smallest_bytes)
    forward_bytes = walk.forward()
    return SpilledPeak(forward_bytes=forward_bytes, backward_bytes=walk.backward(), file_bytes=walk.file_bytes)


class _Walk:
    def __init__(self, graph: Graph, workspace_bytes: Sequence[int], smallest_bytes: int) -> None:
        self._graph = graph
        self._workspaces = workspace_bytes
        self._position = {each.name: place for place, each in enumerate(graph.operations)}
        self._program = identity_program(graph)
        self._operations = [each for each in graph.operations if each.phase is Phase.FORWARD]
        made = {storage for each in self._operations for storage in each.outputs}
        readers = [graph.operations[each.operation] for each in self._program.backward if isinstance(each, Compute)]
        inside = {storage: each.checkpoint for each in self._operations for storage in each.outputs}
        saved = {
            storage
            for each in readers
            for storage in each.inputs
            if storage in made and (each.checkpoint is None or inside[storage] != each.checkpoint)
        }
        self._kept = {storage for storage in saved if self._size(storage) < smallest_bytes}
        self._outputs = {each for each in made & {*graph.held} if self._size(each) >= smallest_bytes}
        self._kept |= made & {*graph.held} - self._outputs
        self.file_bytes = sum(self._size(storage) for storage in saved - self._kept)
        self._live = Counter({*graph.resident})
        self._live_bytes = sum(self._size(storage) for storage in self._live) + _SCALARS_BYTES
        checkpoints = {each.checkpoint for each in graph.operations} - {None}
        self._live_bytes += len(checkpoints) * GENERATOR_STATE_BYTES

    def forward(self) -> int:
        """Walk the forward pass and return its peak."""
        peak_bytes = self._live_bytes
        ends = self._forward_ends()
        for position, operation in enumerate(self._operations):
            self._make(operation)
            peak_bytes = max(peak_bytes, self._live_bytes + self._workspace(operation))
            for storage in ends.get(position, ()):
                self._drop(storage)
        for storage in self._graph.written_back:
            self._drop(storage)
        return peak_bytes

    def backward(self) -> int:
        """Walk the backward pass behind the forward pass and return its peak."""
        for storage in self._graph.tangents:
            self._add(storage)
        if all(self._size(storage) <= _SCALAR_BYTES for storage in self._graph.tangents):  # it starts from a loss
            for storage in self._outputs:
                self._drop(storage)
        peak_bytes = self._live_bytes
        read_back = self._read_back()
        for instruction in self._program.backward:
            if not isinstance(instruction, Compute):
                self._drop(instruction.storage)
                continue
            operation = self._graph.operation(instruction.operation)
            needed = read_back(instruction.operation)
            absent = [each for each in needed if each in self._outputs or not self._live[each]]
            self._make(operation)
            held_bytes = sum(self._size(each) for each in absent)
            peak_bytes = max(peak_bytes, self._live_bytes + held_bytes + self._workspace(operation))
        return peak_bytes

    def _make(self, operation: Operation) -> None:
        if operation.overwrites is not None:
            self._drop(operation.overwrites)
        for storage in operation.outputs:
            self._add(storage)

    def _add(self, storage: int) -> None:
        self._live[storage] += 1
        self._live_bytes += self._size(storage)

    def _drop(self, storage: int) -> None:
        if self._live[storage]:
            self._live[storage] -= 1
            self._live_bytes -= self._size(storage)

    def _size(self, storage: int) -> int:
        return self._graph.storages[storage].size_bytes

    def _workspace(self, operation: Operation) -> int:
        return self._workspaces[self._position[operation.name]] if self._workspaces else 0

    def _forward_ends(self) -> dict[int, list[int]]:
        """By position in the forward pass: the storages that die there, see Note [Held by calls]."""
        lasting = {*self._graph.resident, *self._graph.held, *self._graph.written_back} | self._kept
        call_ends = _call_ends(self._operations)
        makers: dict[int, str] = {}
        last: dict[int, int] = {}
        for position, operation in enumerate(self._operations):
            for storage in operation.outputs:
                makers[storage] = operation.module
                last[storage] = max(last.get(storage, 0), position)
            for storage in operation.inputs:
                end = call_ends(position, makers.get(storage, ""))
                last[storage] = max(last.get(storage, 0), end)
        ends: dict[int, list[int]] = {}
        for storage, end in last.items():
            if storage not in lasting:
                ends.setdefault(end, []).append(storage)
        return ends

    def _read_back(self) -> Callable[[int], set[int]]:
        """By operation: what its node of autograd has in memory while it runs, see Note [Read back]."""
        by_frame: dict[int, set[int]] = {}
        for each in self._graph.operations:
            if each.phase is Phase.BACKWARD and each.frame is not None:
                by_frame.setdefault(each.frame, set()).update(each.inputs)
        by_checkpoint: dict[int, set[int]] = {}
        for each in self._operations:
            if each.checkpoint is not None:
                by_checkpoint.setdefault(each.checkpoint, set()).update(each.inputs)
        for each in self._operations:
            if each.checkpoint is not None:  # what it makes itself is made again
                by_checkpoint[each.checkpoint] -= {*each.outputs}
        made = {storage for each in self._operations for storage in each.outputs}

        def read_back(index: int) -> set[int]:
            operation = self._graph.operation(index)
            if operation.phase is Phase.FORWARD and operation.checkpoint is not None:
                return made & by_checkpoint[operation.checkpoint]
            return made & (set(operation.inputs) if operation.frame is None else by_frame[operation.frame])

        return read_back


def _call_ends(operations: Sequence[Operation]) -> Callable[[int, str], int]:
    """Return a function: when the outermost call returns that an operation runs in and that a value came into."""
    paths = [each.module.split(".") if each.module else [] for each in operations]

    def end(position: int, maker: str) -> int:
        path = paths[position]
        origin = maker.split(".") if maker else []
        depth = next((n for n, (a, b) in enumerate(zip(path, origin, strict=False)) if a != b), None)
        depth = min(len(path), len(origin)) if depth is None else depth
        if depth == len(path):
            return position
        called = path[: depth + 1]
        while position + 1 < len(paths) and paths[position + 1][: depth + 1] == called:
            position += 1
        return position

    return end
