"""A training step as requests to an allocator: what `plan/simulate.py` adds up, one block after another.

Note [Steps as a loop runs them]
    The order is that of Note [What a step is] in `simulate.py`, for several steps from an empty allocator on: what
    is cached after one step decides where the next one finds room. Optimizer state is made in the first optimizer step.
    What lives only in a step is released when it ends: outputs, what a loss keeps. Its gradients go when the next one
    begins, as `zero_grad()` does it. Where a loop keeps them, those of the first step stay where they were made, and
    later ones are added to them and go. Outputs that it keeps go when the next step has made new ones.

Note [Sums of blocks]
    Where of an optimizer's state and temporaries only sums are known, they come in blocks of the sizes of the
    trained parameters, which is how optimizers allocate; a workspace or a loss is one block.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from memfit.ir import BlockEvent, Compute, Graph, Instruction, Kind, LossMemory, OptimizerMemory, Program
from memfit.plan.allocator.requests import Allocate, Release, Request

_STEPS = 3  # the third finds the cache as all later ones do


def step_requests(
    graph: Graph,
    program: Program,
    *,
    workspace_bytes: Sequence[int] = (),
    optimizer: OptimizerMemory | None = None,
    loss: LossMemory | None = None,
    handles: Mapping[int, int] | None = None,
    steps: int = _STEPS,
) -> list[Request]:
    """Write down what `steps` training steps ask for and let go; arguments are those of `simulate`.

    `handles` are bytes that a library takes for good when an operation first runs, by operation.
    """
    walk = _Walk(graph, workspace_bytes, optimizer or OptimizerMemory(), loss, handles or {})
    return list(walk.steps(program, steps))


class _Walk:
    """Which block belongs to which storage, while a program is followed."""

    def __init__(
        self,
        graph: Graph,
        workspace_bytes: Sequence[int],
        optimizer: OptimizerMemory,
        loss: LossMemory | None,
        handles: Mapping[int, int],
    ) -> None:
        self._library_bytes = dict(handles)  # not taken yet
        self._state: defaultdict[int, deque[int]] = defaultdict(deque)  # an optimizer's blocks by size, oldest first
        self._graph = graph
        self._workspaces = workspace_bytes or [0] * (len(graph.operations) + len(graph.alternatives))
        self._optimizer = optimizer
        self._loss = loss
        self._parameter_bytes = [graph.storages[parameter].size_bytes for parameter, _ in graph.trained]
        self._handles = itertools.count()
        self._open: dict[int, list[int]] = {}  # blocks by storage, the newest last
        self._gradients: list[int] = []  # blocks of the step before
        self._made = {gradient for _, gradient in graph.trained}
        self._kept = {storage for storage in graph.resident if graph.storages[storage].kind is Kind.GRADIENT}
        self._old_outputs = {storage for storage in graph.resident if graph.storages[storage].kind is Kind.OUTPUT}
        self._outputs: list[int] = []  # blocks of the step before, where they are kept
        self._is_first = True

    def steps(self, program: Program, count: int) -> Iterator[Request]:
        """Follow a program `count` times."""
        for storage in self._graph.resident:
            if storage not in self._kept and storage not in self._old_outputs:
                yield self._allocate(storage)
        if self._loss is not None:
            yield Allocate(next(self._handles), self._loss.batch_bytes)
        self._open.clear()  # nothing that is there before the step goes in it
        for number in range(count):
            self._is_first = number == 0
            yield from self._step(program)

    def _step(self, program: Program) -> Iterator[Request]:
        yield from (Release(handle) for handle in self._gradients)
        yield from self._follow(program.forward)
        lasting = None
        if self._loss is not None:
            yield from self._at_once(self._loss.working_bytes)
            for storage in self._graph.returned_alone:
                yield from self._release(storage)
            lasting = Allocate(next(self._handles), self._loss.lasting_bytes)
            yield lasting
        for storage in self._graph.tangents:
            yield self._allocate(storage)
        yield from self._follow(program.backward)
        yield from self._optimize()
        self._gradients = [handle for storage in self._made for handle in self._open.pop(storage, ())]
        if self._old_outputs:
            outputs = [each for each in self._graph.held if self._graph.storages[each].kind is Kind.OUTPUT]
            self._outputs = [handle for storage in outputs for handle in self._open.pop(storage, ())]
        yield from (Release(handle) for handles in self._open.values() for handle in handles)
        self._open.clear()
        if lasting is not None:
            yield Release(lasting.handle)

    def _follow(self, instructions: Sequence[Instruction]) -> Iterator[Request]:
        for instruction in instructions:
            if isinstance(instruction, Compute):
                yield from self._compute(instruction)
            elif instruction.storage in self._old_outputs:
                yield from (Release(handle) for handle in self._outputs)
                self._outputs = []
            elif self._is_first and self._kept and instruction.storage in self._made:
                self._open.pop(instruction.storage, None)  # it is the one that is kept
            else:
                yield from self._release(instruction.storage)

    def _compute(self, instruction: Compute) -> Iterator[Request]:
        operation = self._graph.operation(instruction.operation)
        outputs = list(operation.outputs)
        if instruction.in_place and operation.may_overwrite is not None:
            if self._is_taken_over(operation.may_overwrite, outputs):
                block = self._open[operation.may_overwrite].pop()
                self._open.setdefault(outputs.pop(0), []).append(block)
            else:
                yield from self._release(operation.may_overwrite)
        yield from (self._allocate(storage) for storage in outputs)
        if instruction.operation in self._library_bytes:
            yield Allocate(next(self._handles), self._library_bytes.pop(instruction.operation))
        yield from self._at_once(self._workspaces[instruction.operation])

    def _is_taken_over(self, written_over: int, outputs: Sequence[int]) -> bool:
        """Tell whether the first output lies where an input did, rather than in a block of another size."""
        sizes = [self._graph.storages[each].size_bytes for each in (written_over, *outputs[:1])]
        return bool(self._open.get(written_over)) and len(sizes) > 1 and sizes[0] == sizes[1]

    def _optimize(self) -> Iterator[Request]:
        """Make the state in the first step, and what the step itself takes in each."""
        if self._optimizer.blocks is not None:
            blocks = self._optimizer.blocks
            yield from self._follow_blocks(blocks.first_step if self._is_first else blocks.later_step)
            return
        if self._is_first:
            for size_bytes in _blocks(self._optimizer.state_bytes, self._parameter_bytes):
                yield Allocate(next(self._handles), size_bytes)
        workspace_bytes = self._optimizer.workspace_bytes
        taken: deque[Allocate] = deque()
        for change_bytes in self._optimizer.changes_bytes or (workspace_bytes,):
            for size_bytes in _blocks(change_bytes, self._parameter_bytes):
                taken.append(Allocate(next(self._handles), size_bytes))
                yield taken[-1]
            left_bytes = -change_bytes
            while taken and taken[0].size_bytes <= left_bytes:
                left_bytes -= taken[0].size_bytes
                yield Release(taken.popleft().handle)
        yield from (Release(each.handle) for each in taken)

    def _follow_blocks(self, events: Sequence[BlockEvent]) -> Iterator[Request]:
        """Take and release an optimizer's blocks in its own order; what is left is its state."""
        taken: dict[int, Allocate] = {}
        for number, size_bytes in events:
            if size_bytes > 0:
                taken[number] = Allocate(next(self._handles), size_bytes)
                yield taken[number]
            elif number in taken:
                yield Release(taken.pop(number).handle)
            elif self._state[-size_bytes]:
                yield Release(self._state[-size_bytes].popleft())
        for each in taken.values():
            self._state[each.size_bytes].append(each.handle)

    def _at_once(self, size_bytes: int) -> Iterator[Request]:
        """Take and release: what is gone when an operation returns."""
        if size_bytes > 0:
            handle = next(self._handles)
            yield Allocate(handle, size_bytes)
            yield Release(handle)

    def _allocate(self, storage: int) -> Allocate:
        handle = next(self._handles)
        self._open.setdefault(storage, []).append(handle)
        return Allocate(handle, self._graph.storages[storage].size_bytes)

    def _release(self, storage: int) -> Iterator[Request]:
        """Release the newest block of a storage; what is there before the step stays."""
        if self._open.get(storage):
            yield Release(self._open[storage].pop())


def _blocks(total_bytes: int, sizes: Sequence[int]) -> Iterator[int]:
    """Cut a sum into blocks of these sizes, see Note [Sums of blocks].

    >>> list(_blocks(25, [4, 6])), list(_blocks(-3, [4])), list(_blocks(7, []))
    ([4, 4, 6, 6, 4, 1], [], [7])
    """
    if total_bytes <= 0:
        return
    positive = [size for size in sizes if size > 0] or [total_bytes]
    copies, rest_bytes = divmod(total_bytes, sum(positive))
    for size in positive:
        yield from itertools.repeat(size, copies)
    for size in positive:
        if rest_bytes > 0:
            yield min(size, rest_bytes)
            rest_bytes -= size
