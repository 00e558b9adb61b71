"""A step of a captured graph, run with the clock in hand.

Note [Times in the step]
    An operator that is timed alone finds its inputs in the cache and its output in pages that
    were just released; in a step it finds neither. So the captured graph is run as a step runs
    it, forward and backward on the real batch, in place where the eager run works in place,
    values dropped after their last use, with the clock read around every operator. Views before
    an operator and what is dropped after it count to its time: the times add up to the step.

Note [Other forms]
    A program may run an operator in place where the eager run does not, the other way round, or
    an alternative in its stead. Some steps run all of these: operators in their other form, and
    alternatives where they stand in the graph. What an operator would overwrite is copied first,
    outside the measured time, so that everything reads the same numbers as in a plain step. So is what a stretch
    overwrites of which only that form is compiled, unless nobody reads it later: a copy would be found in the cache.

Note [Slow steps]
    A step that takes seconds is run once, not twice: its operators in their plain form, and before some of them
    their other form, whose result is dropped. Of calls that look alike a few are enough, and only such models are
    slow that repeat the same layers.

Note [Seen to be equal]
    What an exact alternative makes is compared bit for bit with what the model's own operator made of the
    same numbers, once, on this machine: libraries choose their algorithms by shape and processor. One that
    differs takes forever, so that no plan has it, and so do those that look like it.

Note [Nothing remains]
    Operators run below autograd and write only into what the step itself made: parameters,
    gradients and buffers stay as they are (new values of buffers are dropped), and generators
    are put back.
"""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from memfit import _torch
from memfit.capture.nodes import REMAKES, TECHNIQUE, is_alternative
from memfit.capture.sample import Sample
from memfit.capture.trace import ROOT
from memfit.errors import InvalidModel
from memfit.ir import Graph, Operation
from memfit.ops.calls import faithful_call
from memfit.ops.inplace import in_place_form
from memfit.ops.registry import find_lean_operator
from memfit.ops.stretch import PREFIX, Stretch
from memfit.tensors import same_bits, states_by_name, tensors_in

_SAMPLES = 3  # calls that look alike, of which other forms are timed in a slow step

Times = dict[str, float]  # microseconds by the name of an operation


def is_stretch(operation: Operation) -> bool:
    """Whether it takes as long in place, see Note [Over the first] in `ops/stretch.py`."""
    return operation.target.startswith(PREFIX)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A node of the graph, ready to run."""

    node: fx.Node
    function: Callable[..., Any]
    copies_first: bool  # its first argument is overwritten and may still be needed
    dying: tuple[fx.Node, ...]  # nobody reads them afterwards
    compared: tuple[fx.Node, ...]  # nor these, when they have been compared, see Note [Seen to be equal]
    is_extra: bool = False  # its result is dropped, see Note [Slow steps]


class TimedStep:
    """A captured graph and real inputs for it, to be run with the clock in hand."""

    def __init__(
        self,
        module: fx.GraphModule,
        graph: Graph,
        model: nn.Module,
        sample: Sample,
        left_out: Collection[str] = (),  # names of alternatives that nothing reads
    ) -> None:
        operations = {operation.name: operation for operation in (*graph.operations, *graph.alternatives)}
        self._timed = operations.keys()
        self._alternatives = {operation.name for operation in graph.alternatives}
        nodes = [node for node in module.graph.nodes if node.name not in left_out]
        dying = graph.overwritable()
        self._plain = [
            dataclasses.replace(call, copies_first=call.copies_first and call.node.name not in dying)
            for call in _calls(module, operations, [node for node in nodes if not is_alternative(node)])
        ]
        self._other = _calls(module, operations, nodes, other_forms=True)
        self._both = _both_calls(module, operations, nodes)
        self._inputs = _inputs(module.graph, model, sample)
        tensors = tensors_in(list(self._inputs.values()))
        if any(isinstance(tensor, _torch.FakeTensor) for tensor in tensors):
            raise InvalidModel(
                f"this {type(model).__name__} or its sample has no memory, so its steps cannot be run and timed; "
                "use memfit.measure.roofline.roofline_times, which estimates from sizes"
            )
        self._cuda = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._compared: set[str] = set()
        self.unequal: set[str] = set()  # alternatives, see Note [Seen to be equal]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """As captured graphs run, whatever the caller is in the middle of; see Note [Nothing remains]."""
        with (
            _torch.no_modes(),
            torch.no_grad(),
            torch.autocast("cuda" if self._cuda else "cpu", enabled=False),
            torch.random.fork_rng(sorted(device.index for device in self._cuda)),
        ):
            yield

    def run(self, *, other_forms: bool = False) -> Times:
        """Microseconds of every operation; with other forms, see Note [Other forms]."""
        return self._run(self._other if other_forms else self._plain)[0]

    def run_both(self) -> tuple[Times, Times]:
        """Microseconds of every operation in its plain form, and of some in others, see Note [Slow steps]."""
        return self._run(self._both)

    def _run(self, calls: Sequence[_Call]) -> tuple[Times, Times]:
        mark = _cuda_mark if self._cuda else time.perf_counter
        values = dict(self._inputs)
        waiting: list[tuple[Any, Any]] = []  # views, for the operation that follows
        spans: dict[str, list[tuple[Any, Any]]] = {}
        extra: dict[str, list[tuple[Any, Any]]] = {}
        for call in calls:
            if call.is_extra:
                extra[call.node.name] = [_run_extra(call, values, mark)]
                continue
            waiting.append(_run(call, values, mark))
            self._compare(call.node, values)
            for node in call.compared:
                del values[node]
            if call.node.name in self._timed:
                spans[call.node.name], waiting = waiting, []
        for device in self._cuda:
            torch.cuda.synchronize(device)
        return _summed(spans), _summed(extra) | _summed(
            {name: each for name, each in spans.items() if name in self._alternatives}
        )

    def _compare(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
        """See Note [Seen to be equal]."""
        if REMAKES not in node.meta or node.name in self._compared:
            return
        self._compared.add(node.name)
        operator = find_lean_operator(node.meta[TECHNIQUE])
        if not operator.exact:
            return
        pairs = list(zip(tensors_in(values[node]), tensors_in(values[node.meta[REMAKES]]), strict=True))
        proves_nothing = not operator.certain and not all(own.any() for _, own in pairs)  # zeros are always equal
        if proves_nothing or not all(same_bits(made, own) for made, own in pairs):
            self.unequal.add(node.name)


def _summed(spans: Mapping[str, list[tuple[Any, Any]]]) -> Times:
    return {name: sum(_microseconds(*span) for span in each) for name, each in spans.items()}


def _run_extra(call: _Call, values: Mapping[fx.Node, Any], mark: Callable[[], Any]) -> tuple[Any, Any]:
    """Run a call beside the step."""
    kept = dict.fromkeys(call.node.all_input_nodes)
    return _run(call, {node: values[node] for node in kept}, mark)


def _run(call: _Call, values: dict[fx.Node, Any], mark: Callable[[], Any]) -> tuple[Any, Any]:
    args: Any
    kwargs: Any
    args, kwargs = fx.node.map_arg((call.node.args, dict(call.node.kwargs)), values.__getitem__)
    if call.copies_first:
        args = (args[0].clone(), *args[1:])
    start = mark()
    values[call.node] = call.function(*args, **kwargs)
    del args, kwargs
    for node in call.dying:
        del values[node]
    return start, mark()


def _calls(
    module: fx.GraphModule, operations: Mapping[str, Operation], nodes: Sequence[fx.Node], *, other_forms: bool = False
) -> list[_Call]:
    dying = _dying(nodes)
    return [
        _call(module, node, operations.get(node.name), dying[node], other_forms=other_forms)
        for node in nodes
        if node.op not in {"placeholder", "output"}
    ]


def _both_calls(module: fx.GraphModule, operations: Mapping[str, Operation], nodes: Sequence[fx.Node]) -> list[_Call]:
    """Every operation in its plain form, and a few of those that look alike in the other one too."""
    sampled = _sampled(nodes, operations)
    nodes = [node for node in nodes if not is_alternative(node) or node in sampled]
    dying = _dying(nodes)
    calls: list[_Call] = []
    for node in nodes:
        if node.op in {"placeholder", "output"}:
            continue
        operation = operations.get(node.name)
        if node in sampled and not is_alternative(node):
            other = _call(module, node, operation, [], other_forms=True)
            calls.append(dataclasses.replace(other, is_extra=True))
        calls.append(_call(module, node, operation, dying[node], other_forms=is_alternative(node)))
    return calls


def _sampled(nodes: Sequence[fx.Node], operations: Mapping[str, Operation]) -> set[fx.Node]:
    """Nodes that are run in another form too, and the alternatives that those read."""
    seen: Counter[str] = Counter()
    sampled: set[fx.Node] = set()
    for node in reversed(nodes):
        operation = operations.get(node.name)
        has_other_form = operation is not None and (
            is_alternative(node) or (operation.may_overwrite is not None and not is_stretch(operation))
        )
        is_read = is_alternative(node) and any(user in sampled for user in node.users)
        if operation is not None and has_other_form and (is_read or seen[operation.signature] < _SAMPLES):
            seen[operation.signature] += 1
            sampled.add(node)
    return sampled


def _call(
    module: fx.GraphModule, node: fx.Node, operation: Operation | None, dying: list[fx.Node], *, other_forms: bool
) -> _Call:
    can_overwrite = operation is not None and operation.may_overwrite is not None
    does_overwrite = operation is not None and operation.overwrites is not None
    in_place = can_overwrite and does_overwrite != other_forms and not isinstance(node.target, Stretch)
    stand_in = node.target.stand_in if isinstance(node.target, Stretch) else None
    form = stand_in or (in_place_form(node.target) if in_place else None)
    compared = {node, node.meta[REMAKES]} if REMAKES in node.meta else set()
    return _Call(
        node=node,
        function=_function(module, node) if form is None else faithful_call(form),
        copies_first=stand_in is not None or (in_place and other_forms),
        dying=tuple(each for each in dying if each not in compared),
        compared=tuple(each for each in dying if each in compared),
    )


def _function(module: fx.GraphModule, node: fx.Node) -> Callable[..., Any]:
    if node.op == "get_attr":
        constant = getattr(module, str(node.target))
        return lambda: constant
    if node.target is torch.ops.aten.detach.default:
        return _same  # below autograd there is nothing to detach from: captured calls leave it out
    return faithful_call(node.target)


def _same(value: Any) -> Any:
    return value


def _dying(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For every node, the values that nobody reads after it."""
    dying: dict[fx.Node, list[fx.Node]] = {}
    read_later: set[fx.Node] = set()
    for node in reversed(nodes):
        read = dict.fromkeys([*node.all_input_nodes, *([node.meta[REMAKES]] if REMAKES in node.meta else [])])
        last_reads = [source for source in read if source not in read_later]
        dying[node] = [*last_reads, *([] if node in read_later else [node])]
        read_later.update(read)
    return dying


def _inputs(graph: fx.Graph, model: nn.Module, sample: Sample) -> dict[fx.Node, Any]:
    states = states_by_name(model)
    leaves = pytree.tree_leaves((sample.args, dict(sample.kwargs)))
    with _torch.no_modes():  # the trace may be open
        return {node: _input(node, states, leaves) for node in graph.nodes if node.op == "placeholder"}


def _input(node: fx.Node, states: Mapping[str, torch.Tensor], leaves: list[Any]) -> Any:
    description = node.meta["desc"]
    path = getattr(description, "target", "").removeprefix(ROOT + ".")
    value = node.meta.get("val")
    if path in states:
        return states[path].detach()
    if type(description).__name__ == "PlainAOTInput":
        value = leaves[description.idx]
        return value.detach() if isinstance(value, torch.Tensor) else value
    return _made_up(value) if isinstance(value, torch.Tensor) else value


def _made_up(value: torch.Tensor) -> torch.Tensor:
    """A tensor of this layout, such as a gradient to start from: random, or zeros where it could be indices.

    Not ones: what follows may cancel them (`x - x.mean()`), and comparing zeros would prove nothing.
    """
    count = value.untyped_storage().nbytes() // value.element_size()
    content = torch.zeros(count, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point:
        content.normal_(generator=torch.Generator(value.device).manual_seed(0))
    return content.as_strided(value.shape, value.stride(), value.storage_offset())


def _cuda_mark() -> torch.cuda.Event:
    """A moment on the device: launches run ahead of it, so the clock of the host would not do."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _microseconds(start: Any, end: Any) -> float:
    if isinstance(start, torch.cuda.Event):
        return float(start.elapsed_time(end)) * 1e3
    return float(end - start) * 1e6
