"""Every private interface of torch that memfit touches, and what we rely on.

`export_joint` rests on `aot_export_joint_with_descriptors`
    One ATen graph of forward and backward; `meta["desc"]` on placeholders and on the output node;
    `meta["custom"]` and `meta["autograd_backward"]` on the other nodes.
`compile_joint` rests on `aot_compile_joint_with_descriptors`, `fw_metadata.bw_donated_idxs`
    Turns a joint graph and a partition function into a callable with autograd.
`split_joint` rests on `_extract_fwd_bwd_modules`
    Two graph modules from a joint graph and the list of saved nodes.
`eager_dispatch` rests on `no_python_dispatcher`
    Composite operators decompose as in the eager run, see Note [Eager decompositions].
`annotation` rests on `torch.fx.traceback.annotate`
    Marks on the nodes that are created meanwhile.
`no_modes` rests on `_disable_current_modes`
    Compute on real tensors while a trace is running.
`below_autograd` rests on `_AutoDispatchBelowAutograd`
    Operators run without being recorded for autograd, with grad mode left on.
`tracing_flags` rests on `torch.compiler._is_compiling_flag`
    Libraries ask it before they look at values.
`keeps_graph` rests on `_get_current_graph_task_keep_graph`
    Inside a backward pass: whether its caller keeps the graph for another one.
`current_node` rests on `_current_autograd_node`
    Inside a backward pass: the node of autograd that is running, whose `next_functions` follow its inputs.
`plain_function` rests on `OpOverload._op`
    The operator without the Python wrapper around it.
`memory_events`, `marked_memory_events` and `MemoryRecorder` rest on `profile.kineto_results`, `_profiler_enabled`
    Allocator events in order, see `measure/peak.py`, and what `set_mark` left among them.
`StorageWeakRef` is `torch.multiprocessing.reductions`' own
    Whether a storage is still in memory, without keeping it there.
`cuda_memory_events` rests on `torch.cuda.memory._record_memory_history`, `_snapshot`
    The same on CUDA.

Note [Eager decompositions]
    While AOTAutograd traces, torch's "python dispatcher" replaces the decompositions of some
    composite operators by Python ones that compute something else than the eager run does:
    dropout becomes `native_dropout` (a 1-byte mask where eager keeps a 4-byte one) and a
    multi-layer LSTM silently loses the dropout between its layers. Switched off during the
    model's forward, the trace shows what the eager run really executes.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.fx.traceback
from torch import fx, nn
from torch._dispatch.python import no_python_dispatcher as eager_dispatch
from torch._functorch._aot_autograd.schemas import JointWithDescriptors
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes as no_modes

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "JointWithDescriptors",
    "MemoryRecorder",
    "StorageWeakRef",
    "annotation",
    "below_autograd",
    "compile_joint",
    "cuda_memory_events",
    "current_node",
    "detect_fake_mode",
    "eager_dispatch",
    "export_joint",
    "keeps_graph",
    "marked_memory_events",
    "memory_events",
    "no_modes",
    "plain_function",
    "set_mark",
    "split_joint",
    "tracing_flags",
]

annotation = torch.fx.traceback.annotate
below_autograd = torch._C._AutoDispatchBelowAutograd
current_node = torch._C._current_autograd_node
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def export_joint(
    stack: contextlib.ExitStack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> JointWithDescriptors:
    """Trace forward and backward of a module into one graph with static shapes."""
    return aot_export_joint_with_descriptors(stack, module, args, kwargs, ignore_shape_env=True)


def compile_joint(
    joint: JointWithDescriptors,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    compile_forward: Callable[[fx.GraphModule], Callable[..., Any]],
    compile_backward: Callable[[fx.GraphModule], Callable[..., Any]],
) -> Callable[..., Any]:
    """Turn a joint graph into a callable `(*parameters, *buffers, *args, **kwargs) -> outputs`."""

    def forward(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:  # noqa: ARG001  (torch's signature)
        return compile_forward(gm)

    def backward(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:  # noqa: ARG001  (torch's signature)
        return compile_backward(gm)

    # Donated buffers would forbid a second backward through a retained graph: none are donated.
    joint._aot_state.fw_metadata.bw_donated_idxs = []
    with torch._functorch.config.patch(donated_buffer=False):
        compiled: Callable[..., Any] = aot_compile_joint_with_descriptors(
            joint, partition_fn=partition, fw_compiler=forward, bw_compiler=backward
        )
    return compiled


def split_joint(
    joint: fx.GraphModule, saved: list[fx.Node], forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph in two; `saved` cross from the forward to the backward graph."""
    # Else dead-code elimination takes draws whose result nobody reads, and the generator falls behind.
    with torch._inductor.config.patch(fallback_random=True):
        return _extract_fwd_bwd_modules(joint, saved, saved_sym_nodes=[], num_fwd_outputs=forward_outputs)


@contextlib.contextmanager
def tracing_flags() -> Iterator[None]:
    """Tell libraries that ask that a trace is running, so that they do not look at values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def plain_function(target: Any) -> Any:
    """The callable behind an operator, without the Python wrapper around it."""
    return target._op if isinstance(target, torch._ops.OpOverload) else target


def memory_events(run: Callable[[], Any]) -> list[int]:
    """Run once and return what every allocation (+) and release (-) on the CPU changed, in order."""
    return [change_bytes for label, change_bytes in marked_memory_events(run) if not label]


def marked_memory_events(run: Callable[[], Any]) -> list[tuple[str, int]]:
    """Allocations and releases, with "" before each, and the marks set between them, with 0 after each."""
    recorder = MemoryRecorder()
    recorder.start()
    try:
        run()
    finally:
        events = recorder.stop()
    return events


class MemoryRecorder:
    """Allocator events of the CPU between `start` and `stop`, as `marked_memory_events` returns them."""

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else every start and stop is printed
        self._profiler = torch.autograd.profiler.profile(profile_memory=True)

    @staticmethod
    def is_free() -> bool:
        """Whether no other profiler is running: there can be one only."""
        return not torch._C._autograd._profiler_enabled()

    def start(self) -> None:
        self._profiler.__enter__()

    def stop(self) -> list[tuple[str, int]]:
        self._profiler.__exit__(None, None, None)
        events = []
        results: Any = self._profiler.kineto_results
        for event in results.events():
            name = event.name()
            if name == "[memory]" and event.device_type() == torch._C._autograd.DeviceType.CPU:
                events.append((event.start_ns(), "", event.nbytes()))
            elif name.startswith(_MARK):
                events.append((event.start_ns(), name.removeprefix(_MARK), 0))
        return [(label, change_bytes) for _, label, change_bytes in sorted(events, key=lambda event: event[0])]


def set_mark(label: str) -> None:
    """Leave a mark among the allocator's events."""
    with torch.autograd.profiler.record_function(_MARK + label):
        pass


_MARK = "memfit mark "


def cuda_memory_events(run: Callable[[], Any]) -> list[int]:
    """Run once and return what every allocation (+) and release (-) on the current CUDA device changed."""
    torch.cuda.memory._record_memory_history(context=None)
    try:
        run()
        torch.cuda.synchronize()
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    events = traces[torch.cuda.current_device()]
    return [signs[event["action"]] * event["size"] for event in events if event["action"] in signs]
