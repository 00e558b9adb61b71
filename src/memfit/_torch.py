"""Every private interface of torch that memfit touches, and what we rely on.

Those of the allocator's events and of what Inductor compiles are in `_memory_events.py`, `_compiler_start.py`,
`_kernel_batches.py` and `_kept_kernels.py`.

`export_joint` rests on `aot_export_joint_with_descriptors`, and on the `view_meta_sequence` of its `output_info`
    One ATen graph of forward and backward; `meta["desc"]` on placeholders and on the output node;
    `meta["custom"]` and `meta["autograd_backward"]` on the other nodes.
`compile_joint` rests on `aot_compile_joint_with_descriptors`, its `__wrapped__`, `fw_metadata.bw_donated_idxs`,
    `aot_config.enable_log`, `aot_graphs_log` and `aot_joint_log`.
    Turns a joint graph and a partition function into a callable with autograd; behind what flattens the arguments is
    the one that takes them in a list.
`result_places` rests on `fw_metadata.num_mutated_inp_runtime_indices`, `num_outputs`
    A forward graph returns changed inputs first, then the results, then what the backward graph needs.
`split_joint` rests on `_extract_fwd_bwd_modules`
    Two graph modules from a joint graph and the list of saved nodes.
`decomposed` rests on `make_fx` and Inductor's `select_decomp_table`
    Operators as Inductor wants them: primitive ones, that it writes kernels of.
`compile_graph` rests on `compile_fx_inner`, `TracingContext`, `CompiledFxGraph.current_callable`, `AsyncCompile.wait`
    and `FxGraphCachePickler.debug_lines`. A graph of primitive operators as a function of a list of tensors, which it
    empties. Its hash is described for logs, here not; `pattern_matcher` looks for products, which it has none of.
    Kernels are compiled by threads of Inductor's own, several in one go (`_kernel_batches.py`); what is made of a graph
    waits for them at its end, and here not before it is asked to.
`eager_dispatch` rests on `no_python_dispatcher`
    Composite operators decompose as in the eager run, see Note [Eager decompositions].
`annotation` rests on `torch.fx.traceback.annotate`
    Marks on the nodes that are created meanwhile.
`failures_unlogged` rests on the logger of `torch._subclasses.fake_tensor` and on what it says of operators that fail.
`fake_results_through` rests on `FakeTensorMode.dispatch`
    Every operator on fake tensors passes it, in the forward and in the backward pass of a trace.
`scripts_inlined` rests on `ScriptFunction.__call__`, on `_torchdynamo_inline` and on `_try_get_jit_cached_function`
    What was compiled by torch.jit.script runs as it was written: the interpreter cannot make tensors in a trace.
`described_by_kernels` rests on `torch._decomp.meta_table`
    Fake tensors take operators that are not in it apart, where they know how, rather than ask what describes them.
`inference_without_gradients` rests on `torch._C._InferenceMode`
    What `torch.inference_mode` enters: it switches autograd's dispatch off, and with it how composites come apart.
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
`backward_pass` rests on `_current_graph_task_id`
    Inside a backward pass: its number.
`node_number` rests on `torch._C._autograd._get_sequence_nr`
    The number that the next node of autograd gets; nodes have it as `_sequence_nr`.
`with_states` rests on `torch.nn.utils.stateless._reparametrize_module`
    Other tensors in the place of a model's parameters and buffers, also where two names have one.
`default_store` rests on `distributed_c10d._get_default_store`
    What the ranks of a process group found each other by; words can be left in it without a collective.
`plain_function` rests on `OpOverload._op`
    The operator without the Python wrapper around it.
`functions_named` rests on `_VariableFunctions`, `TensorBase` and `_nn` of `torch._C`
    The functions that torch has for Python by the name of an operator.
`first_operator` rests on `TorchDispatchMode`
    Sees every operator that a function calls, before it runs.
`layout_check` rests on `TensorGuards` of `torch._C._dynamo`
    Whether tensors are still of the types, sizes, strides, dtypes and devices that others had, and require gradients
    as they did; holds none of them.
`is_transformed` rests on `torch._C._functorch.maybe_current_level`
    Whether a transform of `torch.func` is running.
`attention_settings` rests on the getters of `torch._C` behind `torch.nn.attention.sdpa_kernel`
    Which kernels attention may choose from, and in which order.
`saved_tensors_hooks` rests on `torch._C._autograd._top_saved_tensors_default_hooks`
    Whether somebody packs what autograd saves.
`hooks_aside_in_transforms` rests on that, on the push and pop beside it, and on `disable_saved_tensors_hooks`
    Transforms of `torch.func` (grad, vjp, jacrev, hessian) call the last one, which fails while there are hooks.
`function_modes` rests on `torch._C._len_torch_function_stack` and `_get_function_stack_at`
    The modes that see calls of torch's functions, but for the one that holds the default device.
`compiled_node` and `explained_backward` rest on `_forward_cls` of the node behind a result
    Autograd calls its `backward`: the second puts a function around that of one compiled call.
`sequence_number` rests on `_sequence_nr`
    Nodes of autograd that were recorded later have a higher one, and run first.
`before_backward` and `hooks_registered` rest on `RemovableHandle.next_id`
    Counts the hooks that anybody registers: a prehook of a node counts once.
`trace_rules` is `torch._dynamo`'s own
    Says whose code torch.compile leaves alone.
`graph_module` rests on `_make_graph_module` and `_use_lazy_graph_module`
    A graph module whose code is written when it is first called, which ours are not.
`StorageWeakRef` is `torch.multiprocessing.reductions`' own
    Whether a storage is still in memory, without keeping it there.

Note [Eager decompositions]
    While AOTAutograd traces, torch's "python dispatcher" replaces the decompositions of some
    composite operators by Python ones that compute something else than the eager run does:
    dropout becomes `native_dropout` (a 1-byte mask where eager keeps a 4-byte one) and a
    multi-layer LSTM silently loses the dropout between its layers. Switched off during the
    model's forward, the trace shows what the eager run really executes.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.compiler.config
import torch.distributed
import torch.fx.traceback
from torch import fx, nn
from torch._C._dynamo.guards import TensorGuards
from torch._dispatch.python import no_python_dispatcher as eager_dispatch
from torch._dynamo import trace_rules
from torch._functorch._aot_autograd.graph_compile import aot_graphs_log, aot_joint_log
from torch._functorch._aot_autograd.schemas import JointWithDescriptors
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import forward_ad
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.jit._state import _try_get_jit_cached_function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _disable_current_modes as no_modes
from torch.utils.hooks import RemovableHandle

from memfit._compiler_start import instructions, start_compiler
from memfit._kernel_batches import compile_the_rest, in_batches

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "JointWithDescriptors",
    "StorageWeakRef",
    "annotation",
    "attention_settings",
    "backward_pass",
    "before_backward",
    "below_autograd",
    "compile_graph",
    "compile_joint",
    "compiled_node",
    "current_node",
    "decomposed",
    "default_store",
    "detect_fake_mode",
    "dispatch_modes",
    "eager_dispatch",
    "explained_backward",
    "export_joint",
    "failures_unlogged",
    "fake_results_through",
    "first_operator",
    "forget_real_tensors",
    "fresh_kernel_cache",
    "function_modes",
    "functions_named",
    "graph_module",
    "hooks_aside_in_transforms",
    "hooks_registered",
    "is_batched",
    "is_plain",
    "is_transformed",
    "keeps_graph",
    "layout_check",
    "no_modes",
    "node_number",
    "plain_function",
    "result_places",
    "saved_tensors_hooks",
    "scripts_inlined",
    "sequence_number",
    "split_joint",
    "tracing_flags",
    "with_states",
]

trace_rules.add("memfit")  # who compiles around a fitted model does not compile memfit

annotation = torch.fx.traceback.annotate
below_autograd = torch._C._AutoDispatchBelowAutograd
current_node: Callable[[], Any] = torch._C._current_autograd_node
node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
_transform_level = torch._C._functorch.maybe_current_level
backward_pass = torch._C._current_graph_task_id
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` is running, or derivatives are taken forwards."""
    return _transform_level() is not None or forward_ad._current_level >= 0


def is_batched(tensors: Sequence[Any]) -> bool:
    """Return whether some tensors stand for several ones, as in `torch.autograd.grad(..., is_grads_batched=True)`."""
    kinds = (torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor)
    return any(isinstance(each, torch.Tensor) and any(kind(each) for kind in kinds) for each in tensors)


_ATTENTION_GETTERS = (
    torch._C._get_math_sdp_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_overrideable_sdp_enabled,
)


def attention_settings() -> tuple[Any, ...]:
    """Return which kernels attention may choose from."""
    return (*[get() for get in _ATTENTION_GETTERS], *torch._C._get_sdp_priority_order())


def saved_tensors_hooks() -> bool:
    """Return whether hooks of others pack what autograd saves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not _is_own(hooks)


def _is_own(hooks: Any) -> bool:
    return str(getattr(hooks[0], "__module__", "")).startswith("memfit.")


@contextlib.contextmanager
def hooks_aside_in_transforms() -> Iterator[None]:
    """Let transforms of `torch.func` run without hooks of memfit's for saved tensors, beside which they cannot."""
    disabled = torch.autograd.graph.disable_saved_tensors_hooks

    @contextlib.contextmanager
    def without_own(error_message: str) -> Iterator[None]:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        own = hooks if hooks is not None and _is_own(hooks) else None
        if own is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with disabled(error_message):
                yield
        finally:
            if own is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*own)

    torch.autograd.graph.disable_saved_tensors_hooks = without_own
    try:
        yield
    finally:
        torch.autograd.graph.disable_saved_tensors_hooks = disabled


def function_modes() -> list[Any]:
    """Return the modes that see calls of torch's functions."""
    count = torch._C._len_torch_function_stack()
    modes = [torch._C._get_function_stack_at(place) for place in range(count)]
    return [mode for mode in modes if not isinstance(mode, DeviceContext)]


def dispatch_modes() -> list[Any]:
    """Return the modes of others that see the operators that run; tensors without memory tell what these take."""
    modes: list[Any] = _get_current_dispatch_mode_stack()
    return [
        mode
        for mode in modes
        if not isinstance(mode, FakeTensorMode) and not type(mode).__module__.startswith("memfit.")
    ]


def explained_backward(result: torch.Tensor, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let `around` make what runs in the place of a compiled call's backward pass, found by one of its results."""
    node = compiled_node(result)
    if node is not None:
        function = node._forward_cls
        function.backward = staticmethod(around(function.backward))


def compiled_node(result: torch.Tensor) -> Any:
    """Return autograd's node of a compiled call, found by one of its results; None if there is none."""
    node: Any = result.grad_fn
    while node is not None and "CompiledFunction" not in getattr(getattr(node, "_forward_cls", None), "__name__", ""):
        node = node.next_functions[0][0] if node.next_functions else None  # views of results have nodes of their own
    return node


def node_name(node: Any) -> str:
    """Return the name of a node of autograd, whatever a function written by hand has put on it (`ctx.name = ...`)."""
    name: str = type(node).name(node)
    return name


def sequence_number(node: Any) -> int:
    """Tell when a node of autograd was recorded."""
    number: int = node._sequence_nr()
    return number


_hooks_of_memfit = 0


def before_backward(node: Any, function: Callable[[tuple[torch.Tensor | None, ...]], None]) -> None:
    """Call a function with the gradients that reach a node of autograd, by the thread that then runs it."""
    global _hooks_of_memfit
    node.register_prehook(function)
    _hooks_of_memfit += 1


def hooks_registered() -> int:
    """Count the hooks that others have registered so far: of modules, tensors and nodes."""
    count: int = RemovableHandle.next_id
    return count - _hooks_of_memfit


@contextlib.contextmanager
def failures_unlogged() -> Iterator[None]:
    """Let what fails without memory only be raised: memfit says what that means, or does otherwise."""
    unlogged = _WithoutFailures()
    _LOG_OF_FAKES.addFilter(unlogged)
    try:
        yield
    finally:
        _LOG_OF_FAKES.removeFilter(unlogged)


class _WithoutFailures(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "failed while attempting to run meta" not in str(record.msg)


_LOG_OF_FAKES = logging.getLogger("torch._subclasses.fake_tensor")


def export_joint(
    stack: contextlib.ExitStack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> JointWithDescriptors:
    """Trace forward and backward of a module into one graph with static shapes."""
    with _use_lazy_graph_module(True), failures_unlogged():
        joint = aot_export_joint_with_descriptors(stack, module, args, kwargs, ignore_shape_env=True)
    _replay_views_with_gradients(joint)
    return joint


def _replay_views_with_gradients(joint: JointWithDescriptors) -> None:
    """Let torch make views that require a gradient without the `detach` that in-place writes leave in their history."""
    for output in joint._aot_state.fw_metadata.output_info:
        views = output.view_meta_sequence
        if views is not None and output.requires_grad:
            views.sequence = [each for each in views.sequence if type(each).__name__ != "detach_ViewMeta"]


def with_states(module: nn.Module, states: dict[str, torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Put tensors in the place of a module's parameters and buffers, all places of one of them, for a while."""
    swapped: contextlib.AbstractContextManager[Any] = _reparametrize_module(module, states, tie_weights=True)
    return swapped


@contextlib.contextmanager
def fake_results_through(
    correct: Callable[[FakeTensorMode, Any, Any, Any, Any], Any],
    at_once: Callable[[FakeTensorMode, Any, Any, Any], Any | None],
) -> Iterator[None]:
    """Let what operators make of fake tensors pass a function of mode, operator, arguments and result.

    `at_once` is asked first, without a result: what it makes is taken as it is.
    """
    own = FakeTensorMode.dispatch

    def dispatch(self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = at_once(self, func, args, kwargs)
        if made is not None:
            return made
        return correct(self, func, args, kwargs or {}, own(self, func, types, args, kwargs))

    FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensorMode.dispatch = own  # type: ignore[method-assign]


_script_of: Callable[[Any], Any] = _try_get_jit_cached_function


@contextlib.contextmanager
def scripts_inlined() -> Iterator[None]:
    """Let functions that torch.jit.script compiled run as they were written, in this thread."""
    scripts: Any = torch.jit.ScriptFunction
    own, thread = scripts.__call__, threading.get_ident()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        written: Any = getattr(self, "_torchdynamo_inline", None)
        if written is None or threading.get_ident() != thread:
            return own(self, *args, **kwargs)
        # What torch.jit.trace made is not what was written: it goes the way that its example went.
        compiled: Any = _script_of(written)
        is_script = compiled is not None and compiled.qualified_name == self.qualified_name
        return written(*args, **kwargs) if is_script else own(self, *args, **kwargs)

    scripts.__call__ = call
    try:
        yield
    finally:
        scripts.__call__ = own


@contextlib.contextmanager
def described_by_kernels(operators: Sequence[torch._ops.OpOverload]) -> Iterator[None]:
    """Let what is registered for tensors without memory tell the results of these operators on fake ones."""
    added = [each for each in operators if each not in torch._decomp.meta_table]
    torch._decomp.meta_table.update({each: each for each in added})
    try:
        yield
    finally:
        for each in added:
            del torch._decomp.meta_table[each]


@contextlib.contextmanager
def inference_without_gradients() -> Iterator[None]:
    """Let `torch.inference_mode` do what `torch.no_grad` does, under which operators come apart as in training.

    What it does beside is kept: autocast holds no weights that it has cast.
    """
    inference_mode, has_gradients = torch._C._InferenceMode, torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(has_gradients):
        torch._C._InferenceMode = _without_gradients  # type: ignore[misc,assignment]
        try:
            yield
        finally:
            torch._C._InferenceMode = inference_mode  # type: ignore[misc]


@contextlib.contextmanager
def compiled_as_written() -> Iterator[None]:
    """Let what `torch.compile` was called for run as it is written."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", message="Using `torch.compile")  # with hooks that see all modules
        yield


@contextlib.contextmanager
def _without_gradients(mode: bool) -> Iterator[None]:
    keeps_casts = torch.is_autocast_cache_enabled()
    with torch.set_grad_enabled(not mode):
        torch.set_autocast_cache_enabled(keeps_casts and not mode)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(keeps_casts)


def compile_joint(
    joint: JointWithDescriptors,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    compile_forward: Callable[[fx.GraphModule], Callable[..., Any]],
    compile_backward: Callable[[fx.GraphModule], Callable[..., Any]],
) -> Callable[[list[Any]], Sequence[Any]]:
    """Turn a joint graph into a callable of parameters, buffers and arguments, all in one list."""

    def forward(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:  # noqa: ARG001  (torch's signature)
        return compile_forward(gm)

    def backward(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:  # noqa: ARG001  (torch's signature)
        return compile_backward(gm)

    state = joint._aot_state
    traced = state.fw_metadata
    state.fw_metadata = copy.copy(traced)  # it is written into, and a joint graph may be compiled again
    # Donated buffers would forbid a second backward through a retained graph: none are donated.
    state.fw_metadata.bw_donated_idxs = []
    state.aot_config = dataclasses.replace(state.aot_config, enable_log=_logs_graphs())
    try:
        with torch._functorch.config.patch(donated_buffer=False), _use_lazy_graph_module(True):
            compiled: Any = aot_compile_joint_with_descriptors(
                joint, partition_fn=partition, fw_compiler=forward, bw_compiler=backward
            )
    finally:
        state.fw_metadata = traced
    flat: Callable[[list[Any]], Sequence[Any]] = compiled.__wrapped__
    return flat


def _logs_graphs() -> bool:
    """Whether torch was told to log graphs: else writing them as text is a fifth of the time of `compile_joint`."""
    heard = any(each.isEnabledFor(logging.INFO) for each in (aot_graphs_log, aot_joint_log))
    return heard or bool({"TORCH_TRACE", "TORCH_DTRACE"} & {*os.environ})


def forget_real_tensors(joint: JointWithDescriptors) -> None:
    """Let go of the real tensors that a trace has fake ones of: who holds them weakly cannot swap them."""
    values = [node.meta.get("val") for node in joint.graph_module.graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode(values)
    if mode is not None:
        converter = mode.fake_tensor_converter.meta_converter
        converter.tensor_memo.clear()
        converter.storage_memo.clear()
        converter.describer.lookup_tensor.clear()
        converter.describer.lookup_storage.clear()


def result_places(joint: JointWithDescriptors) -> range:
    """Where the module's own results stand among what its forward graph returns."""
    metadata = joint._aot_state.fw_metadata
    first = metadata.num_mutated_inp_runtime_indices
    return range(first, first + metadata.num_outputs)


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph with the constants of a module; no code is written of it before it is called."""
    with _use_lazy_graph_module(True):
        made: fx.GraphModule = _make_graph_module(root, graph)
    return made


def split_joint(
    joint: fx.GraphModule, saved: list[fx.Node], forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph in two; `saved` cross from the forward to the backward graph."""
    # Else dead-code elimination takes draws whose result nobody reads, and the generator falls behind.
    with torch._inductor.config.patch(fallback_random=True):
        return _extract_fwd_bwd_modules(joint, saved, saved_sym_nodes=[], num_fwd_outputs=forward_outputs)


def decomposed(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """A graph on primitive operators that computes what `module` does; `inputs` have no memory."""
    start_compiler()  # what has to be decomposed has no kernel yet, as a rule
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own ways
        import torch._inductor.lowering  # takes a second; decompositions look for it
        from torch._inductor.decomposition import select_decomp_table

    mode = detect_fake_mode(inputs)
    assert mode is not None
    with no_modes(), torch.no_grad(), mode:
        return make_fx(module, decomposition_table=select_decomp_table())(*inputs)


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> tuple[Callable[[list[Any]], Sequence[Any]], Callable[[], None]]:
    """Let Inductor compile a graph of primitive operators; what it makes has the layout that the graph says.

    Kernels are compiled beside what follows: the function may be called when the second one that is returned was.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor.compile_fx import compile_fx_inner  # takes a second to import

    start_compiler().join()
    output = module.graph.output_node()
    results: Any = output.args[0]
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    output.meta["original_output_strides"] = [node.meta["val"].stride() for node in results]
    mode = _mode_for_kernels()
    with no_modes(), torch.no_grad(), tracing(TracingContext(mode)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own ways
        with mode:
            values = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
        with _kernels_later() as waiting, in_batches(), _as_graphs_without_products(), _known_by_instructions():
            compiled: Any = compile_fx_inner(module, values)

    def finish() -> None:
        compile_the_rest()
        while waiting:
            waiting[-1]()
            waiting.pop()  # not before: it may be interrupted

    return compiled.current_callable, finish


@functools.cache
def _mode_for_kernels() -> FakeTensorMode:
    """One for all that is compiled: inputs may be of another trace's, and it remembers what operators make.

    Inductor remembers only graphs of a mode that knows shapes.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def _known_by_instructions() -> contextlib.AbstractContextManager[None]:
    """See Note [Graphs by instructions] in `_compiler_start.py`."""
    settings: Any = torch.compiler.config
    patched: contextlib.AbstractContextManager[None] = settings.patch(
        cache_key_tag=f"{settings.cache_key_tag} {instructions()}"
    )
    return patched


@contextlib.contextmanager
def _as_graphs_without_products() -> Iterator[None]:
    """Without what takes time for each graph and is for others: patterns of products, and words for logs of hashes."""
    from torch._inductor.codecache import FxGraphCachePickler

    describe = FxGraphCachePickler.debug_lines
    FxGraphCachePickler.debug_lines = lambda *_: []  # type: ignore[method-assign]
    try:
        with torch._inductor.config.patch(pattern_matcher=False):
            yield
    finally:
        FxGraphCachePickler.debug_lines = describe  # type: ignore[method-assign]


@functools.cache
def _forget_threads_in_children(compiling: Any) -> None:
    """A process that is forked has none of the threads that compile, and would wait for them."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=compiling.pool.cache_clear)


@contextlib.contextmanager
def fresh_kernel_cache() -> Iterator[None]:
    """Compile without the cache on disk."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


@contextlib.contextmanager
def _kernels_later() -> Iterator[list[Callable[[], None]]]:
    """What is compiled meanwhile does not wait for its kernels; what would wait is collected."""
    from torch._inductor.async_compile import AsyncCompile

    _forget_threads_in_children(AsyncCompile)
    waiting: list[Callable[[], None]] = []
    wait, here = AsyncCompile.wait, threading.get_ident()

    def collect(self: Any, scope: dict[str, Any]) -> None:
        if threading.get_ident() != here:
            wait(self, scope)
        else:
            waiting.append(lambda: wait(self, scope))

    AsyncCompile.wait = collect  # type: ignore[method-assign]
    try:
        yield waiting
    finally:
        AsyncCompile.wait = wait  # type: ignore[method-assign]


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


def operators_of_key(key: str) -> set[str]:
    """Names of the operators that have a kernel for a dispatch key: "aten::linear"."""
    return {*torch._C._dispatch_get_registrations_for_dispatch_key(key)}


def functions_named(target: torch._ops.OpOverload) -> list[Callable[..., Any]]:
    """The functions of Python that are named as an operator of torch's own."""
    space, _, name = target._schema.name.partition("::")
    rooms: list[Any] = [torch._C._VariableFunctions, torch._C.TensorBase, torch._C._nn]
    return [getattr(room, name) for room in rooms if space == "aten" and hasattr(room, name)]


class _FirstOperator(TorchDispatchMode):
    """Remembers the first operator that is called, and stops it."""

    seen: tuple[Any, Sequence[Any], dict[str, Any]] = (None, (), {})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = func, args, kwargs or {}
        raise NotImplementedError


def first_operator(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """The operator that a function calls first (None if it does not come to that), and its arguments."""
    mode = _FirstOperator()
    with mode, contextlib.suppress(Exception):
        function(*args, **kwargs)
    return mode.seen


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether each is laid out as its predecessor here, and none is given twice."""
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no subclass; one without memory stands for a plain one."""
    return type(tensor) in (torch.Tensor, FakeTensor)


def default_store() -> Any:
    """The store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


@contextlib.contextmanager
def silent_fake_errors() -> Iterator[None]:
    """Operators on tensors without memory may fail here; torch does not log that."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
