"""Run a program of a captured step with a clock around every operator, inside a limit.

Note [Times in the step]
    An operator that is timed alone finds its inputs in the cache and its output in pages that were just released; in a
    step it finds neither. So a whole step runs, forward and backward on the real batch, with the clock read around
    every operator. Views before an operator and releases after it count to its time: the times add up to the step.

Note [Inside the limit]
    The step that runs is that of a program, and a program is made for a budget: its peak is known before it runs. So
    operators are timed where the unplanned step does not fit. What the optimizer keeps counts as if it were there.
    Gradients are dropped as soon as they are computed, so that gradients of an earlier step may stay where they are.

Note [Extra runs]
    Another program may run an operator in place where this one does not, the other way round, or another variant in
    its stead. Where there is room, a few of those that look alike run beside the step, next to the operator whose
    inputs they share, and their results are dropped. What an extra run would overwrite is copied first, outside the
    measured time, so that the step reads the numbers it would read without.

Note [Seen to be equal]
    What an exact variant makes is compared bit for bit with what the model's own operator made of the same numbers,
    once, on this machine: libraries choose their algorithms by shape and processor. One that differs is never used,
    and neither are those that look like it.

Note [Nothing remains]
    Operators run below autograd and write only into what the step itself made: parameters, gradients and buffers stay
    as they are (new values of buffers are dropped), and generators are put back.
"""

import contextlib
import dataclasses
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from memfit import _torch
from memfit.accelerator import accelerators_of, generators_kept, synchronize, timed_event, without_autocast
from memfit.capture.nodes import REMAKES
from memfit.capture.sample import Sample
from memfit.capture.trace import ROOT
from memfit.collecting import collected_later
from memfit.errors import ExecutionError, InvalidModel
from memfit.execute.codegen import OVERWRITES
from memfit.execute.rebuild import OPERATION, ProgramBuilder, owned
from memfit.ir import Compute, Graph, Operation, Phase, Program
from memfit.ops.calls import faithful_call
from memfit.ops.inplace import in_place_form
from memfit.ops.offload import bring_back, send_out
from memfit.ops.registry import find_lean_operator
from memfit.ops.stretch import PREFIX, Stretch
from memfit.tensors import is_all_zero, same_bits, states_by_name, tensors_in
from memfit.transfers import transfers_of

_SAMPLES = 3  # extra runs of calls that look alike
_SLACK = 0.05  # of what an extra run takes, on top: memory of results that the graph does not read is not counted

_EXTRA = "memfit_extra"  # mark on calls that run beside the step: (operation, whether in place)
_COPIES = "memfit_copies"  # mark on calls whose first argument is copied before

Form = tuple[int, bool]  # number of an operation or variant, and whether it runs in place
Times = dict[Form, list[float]]  # microseconds of every run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """How much memory a timed step may take, and what counts besides the values of its graph."""

    limit_bytes: int | None = None  # None: no limit
    external_bytes: int = 0  # live all along: optimizer state, other models
    workspace_bytes: Sequence[int] = ()  # by operation, then by variant

    def workspace(self, index: int) -> int:
        return self.workspace_bytes[index] if self.workspace_bytes else 0


def is_fused(operation: Operation) -> bool:
    """Return whether it takes as long in place, see Note [Over the first] in `ops/stretch.py`."""
    return operation.target.startswith(PREFIX)


class TimedStep:
    """A program of a captured graph and real inputs for it, to be run with the clock in hand."""

    def __init__(
        self,
        module: fx.GraphModule,
        graph: Graph,
        program: Program,
        model: nn.Module,
        sample: Sample,
        *,
        limit: Limit | None = None,
        left_out: Collection[int] = (),  # variants that are not run
        with_extras: bool = True,
    ) -> None:
        self._inputs = _Inputs(module.graph, model, sample)
        self.equal: set[int] = set()  # variants, see Note [Seen to be equal]
        self.unequal: set[int] = set()
        self._devices = self._inputs.devices
        with collected_later():
            self._plain = _calls(module, _rebuilt(ProgramBuilder(module.graph, graph, program), program))
            self._both = self._plain
            if with_extras:
                builder = _ExtraBuilder(module.graph, graph, program, limit or Limit(), left_out, self._compare)
                self._both = _calls(module, _rebuilt(builder, program))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """As captured graphs run, whatever the caller is in the middle of; see Note [Nothing remains]."""
        with (
            _torch.no_modes(),
            torch.no_grad(),
            without_autocast(),
            generators_kept(self._devices),
        ):
            yield

    def run(self, *, with_extras: bool = False) -> tuple[Times, Times]:
        """Microseconds of every operation of the step, and of every extra run."""
        mark = functools.partial(timed_event, self._devices[0]) if self._devices else time.perf_counter
        values = _Values(self._inputs)
        waiting: list[tuple[Any, Any]] = []  # views, for the operation that follows
        spans: list[tuple[Form, bool, list[tuple[Any, Any]]]] = []
        for call in self._both if with_extras else self._plain:
            waiting.append(call.run(values, mark))
            if call.form is not None:
                spans.append((call.form, call.is_extra, waiting))
                waiting = []
        for device in self._devices:
            synchronize(device)
        own: Times = defaultdict(list)
        extra: Times = defaultdict(list)
        for form, is_extra, each in spans:
            (extra if is_extra else own)[form].append(sum(_microseconds(*span) for span in each))
        return dict(own), dict(extra)

    def _compare(self, variant: int, technique: str, made: Any, own: Any) -> None:
        """See Note [Seen to be equal]."""
        if variant in self.equal or variant in self.unequal:
            return
        operator = find_lean_operator(technique)
        pairs = list(zip(tensors_in(made), tensors_in(own), strict=True))
        proves_nothing = not operator.certain and any(is_all_zero(one) for _, one in pairs)  # zeros are always equal
        if not proves_nothing:
            are_equal = all(same_bits(one, other) for one, other in pairs)
            (self.equal if are_equal else self.unequal).add(variant)


def _rebuilt(builder: ProgramBuilder, program: Program) -> fx.Graph:
    """The graph of a program, whose results nobody holds."""
    builder.run(program.forward, [])
    builder.turn_around()
    builder.run(program.backward, [])
    builder.graph.output([])
    return builder.graph


class _ExtraBuilder(ProgramBuilder):
    """Writes extra runs beside those of a program, see Note [Extra runs]."""

    def __init__(
        self,
        joint: fx.Graph,
        graph: Graph,
        program: Program,
        limit: Limit,
        left_out: Collection[int],
        compare: Callable[[int, str, Any, Any], None],
    ) -> None:
        super().__init__(joint, graph, program)
        self._limit = limit
        self._record = compare
        self._live_bytes = limit.external_bytes + self._size(graph.resident)
        self._forms_bytes = 0  # of smaller forms that an extra run has made for itself
        self._sampled: Counter[tuple[str, bool]] = Counter()
        self._compared: Counter[str] = Counter()
        own = {each.outputs[0]: index for index, each in enumerate(graph.operations) if each.outputs}
        self._variants: dict[int, list[int]] = defaultdict(list)  # by own operation: other ways to do the same
        self._forms: dict[int, list[int]] = defaultdict(list)  # by own operation: smaller forms of what it makes
        self._form_of: dict[str, int] = {}  # by node: the variant that makes a smaller form
        for number, variant in enumerate(graph.alternatives, start=len(graph.operations)):
            if number in left_out:
                continue
            made = own.get(variant.outputs[0])
            if made is not None:
                self._variants[made].append(number)
            else:
                self._form_of[variant.name] = number
                readable = [own[each] for each in variant.inputs if each in own]
                if readable:
                    self._forms[max(readable)].append(number)
        self._own = own

    def turn_around(self) -> None:
        super().turn_around()
        self._live_bytes += self._size(self._ir.tangents)

    def _compute(self, instruction: Compute) -> None:
        operation = self._ir.operation(instruction.operation)
        in_backward = operation.phase is Phase.BACKWARD
        self._running = operation
        if instruction.in_place and self._wants(operation, in_place=False):
            self._extra(instruction.operation)
        own = self._own.get(operation.outputs[0]) if operation.outputs else None
        comparisons = self._variant_runs(own, instruction, operation) if in_backward else []
        if instruction.in_place and operation.may_overwrite is not None:
            self._live_bytes -= self._size((operation.may_overwrite,))
        self._live_bytes += self._size(operation.outputs)
        super()._compute(instruction)
        call = self._last_call
        if not in_backward:
            comparisons = self._variant_runs(own, instruction, operation)
        if instruction.operation == own:
            for variant, made in comparisons:
                self._compare(variant, made, call)
        if not instruction.in_place and operation.may_overwrite is not None and self._wants(operation, in_place=True):
            self._extra(instruction.operation, in_place=True)
        for form in self._forms.get(instruction.operation, ()) if self._phase is Phase.FORWARD else ():
            if self._wants(self._ir.operation(form), in_place=False):
                self._extra(form)

    def _free(self, storage: int) -> None:
        if self._live[storage]:
            self._live_bytes -= self._size((storage,))
        super()._free(storage)

    def _variant_runs(self, own: int | None, running: Compute, operation: Operation) -> list[tuple[int, fx.Node]]:
        """Run other ways to do what an operation does beside it; those that can be compared with it are returned."""
        made: list[tuple[int, fx.Node]] = []
        if own is None or self._phase is not operation.phase:
            return made
        held_bytes = self._size(operation.outputs) * (
            operation.phase is Phase.BACKWARD
        )  # the own ones, if yet to be made
        held_bytes += self._limit.workspace(running.operation)
        for number in (own, *self._variants.get(own, ())):
            each = self._ir.operation(number)
            if number == running.operation or each.random:
                continue
            forms = [False] if each.may_overwrite is None or is_fused(each) else [False, True]
            wanted = [in_place for in_place in forms if self._wants(each, in_place=in_place)]
            unproven = number != own and self._compared[each.signature] == 0 and self._is_exact(each)
            for in_place in dict.fromkeys((*wanted, *([False] if unproven and not wanted else []))):
                node = self._extra(number, in_place=in_place)
                if node is not None and unproven and self._fits(held_bytes + self._size(each.outputs)):
                    made.append((number, node))
                    held_bytes += self._size(each.outputs)
                    self._compared[each.signature] += 1
                    unproven = False
        return made

    def _wants(self, operation: Operation, *, in_place: bool) -> bool:
        """Return whether a form of an operation is to be run beside the step."""
        if operation.random or not operation.signature or (in_place and is_fused(operation)):
            return False
        return self._sampled[operation.signature, in_place] < _SAMPLES

    def _is_exact(self, operation: Operation) -> bool:
        return find_lean_operator(operation.technique).exact

    def _extra(self, index: int, *, in_place: bool = False) -> fx.Node | None:
        """Write an extra run; None if it cannot read what it needs, or has no room."""
        operation = self._ir.operation(index)
        node = self._values.node(operation)
        copied = (operation.may_overwrite,) if in_place and operation.may_overwrite is not None else ()
        # The workspace is that of a run into new memory, which a run in place may exceed by as much as it would make.
        needed_bytes = self._size(operation.outputs) + self._size(copied) + self._limit.workspace(index)
        needed_bytes += int(_SLACK * needed_bytes)
        if not self._fits(needed_bytes) or (in_place and in_place_form(node.target) is None):
            return None
        forms_bytes, self._forms_bytes = self._forms_bytes, 0
        try:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self._fetch_or_make)
        except ExecutionError:
            return None
        finally:
            made_bytes, self._forms_bytes = self._forms_bytes, forms_bytes
        if not self._fits(made_bytes + needed_bytes):
            return None
        call = self._call(node.target, args, kwargs, node)
        call.meta.update({OVERWRITES: in_place, _EXTRA: (index, in_place), _COPIES: in_place})
        self._sampled[operation.signature, in_place] += 1
        return call

    def _fetch_or_make(self, node: fx.Node) -> fx.Node:
        """A node as it is now; a smaller form that the program does not make is made for the reader."""
        try:
            return self._fetch(node)
        except ExecutionError:
            form = self._form_of.get(node.name)
            made = None if form is None else self._extra(form)
            if form is None or made is None:
                raise
            self._forms_bytes += self._size(self._ir.operation(form).outputs)
            return made

    def _compare(self, variant: int, made: fx.Node, call: fx.Node | None) -> None:
        """Write a comparison of what a variant made with what the operation made."""
        operation = self._ir.operation(variant)
        remade = self._values.node(operation).meta.get(REMAKES)
        own = call
        if remade is not None and self._values.node(self._ir.operation(self._own_of(variant))) is not remade:
            try:
                own = self._fetch(remade)
            except ExecutionError:
                return
        record, technique = self._record, operation.technique
        compare = self.graph.call_function(_Comparison(record, variant, technique), (made, own))
        compare.meta.update(val=None)

    def _own_of(self, variant: int) -> int:
        return self._own[self._ir.operation(variant).outputs[0]]

    def _fits(self, more_bytes: int) -> bool:
        limit_bytes = self._limit.limit_bytes
        return limit_bytes is None or self._live_bytes + more_bytes <= limit_bytes

    def _size(self, storages: Sequence[int]) -> int:
        return sum(self._ir.storages[each].size_bytes for each in storages)


@dataclasses.dataclass(frozen=True, slots=True)
class _Comparison:
    """Compares what a variant made with the model's own result, as a call of the graph."""

    record: Callable[[int, str, Any, Any], None]
    variant: int
    technique: str
    __name__ = "compare"

    def __call__(self, made: Any, own: Any) -> None:
        self.record(self.variant, self.technique, made, own)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _TimedCall:
    """A node of the graph, ready to run."""

    node: fx.Node
    function: Callable[..., Any]
    copies_first: bool  # its first argument is overwritten and may still be read
    dying: tuple[fx.Node, ...]  # nobody reads them afterwards
    form: Form | None  # None: a view, or a comparison
    is_extra: bool

    def run(self, values: "_Values", mark: Callable[[], Any]) -> tuple[Any, Any]:
        args: Any
        kwargs: Any
        args, kwargs = fx.node.map_arg((self.node.args, dict(self.node.kwargs)), values.__getitem__)
        if self.copies_first:
            args = (args[0].clone(), *args[1:])
        start = mark()
        values.made[self.node] = self.function(*args, **kwargs)
        del args, kwargs
        for node in self.dying:
            values.made.pop(node, None)
        return start, mark()


def _calls(module: fx.GraphModule, graph: fx.Graph) -> list[_TimedCall]:
    """The calls of a graph, with the constants of a module."""
    nodes = list(graph.nodes)
    dying = _dying(nodes)
    return [_timed_call(module, node, dying[node]) for node in nodes if node.op not in {"placeholder", "output"}]


def _timed_call(module: fx.GraphModule, node: fx.Node, dying: list[fx.Node]) -> _TimedCall:
    extra = node.meta.get(_EXTRA)
    form = None if isinstance(node.target, _Comparison) else extra or node.meta.get(OPERATION)
    target: Any = node.target
    copies_first = bool(node.meta.get(_COPIES))
    if node.meta.get(OVERWRITES):
        target = in_place_form(target)
    elif isinstance(target, Stretch) and target.stand_in is not None:
        first: Any = node.args[0]
        target, copies_first = target.stand_in, first not in dying or first.op == "placeholder"
    return _TimedCall(
        node=node,
        function=_function(module, node, target),
        copies_first=copies_first,
        dying=tuple(dying),
        form=form,
        is_extra=extra is not None,
    )


def _function(module: fx.GraphModule, node: fx.Node, target: Any) -> Callable[..., Any]:
    if node.op == "get_attr":
        constant = getattr(module, str(node.target))
        return lambda: constant
    if target is torch.ops.aten.detach.default or target is owned:
        return _same  # below autograd there is nothing to detach from, and outside of it nobody keeps a graph
    if target in (send_out, bring_back):
        return functools.partial(_transferred, target)
    return target if isinstance(target, _Comparison) else faithful_call(target)


def _transferred(target: Callable[..., torch.Tensor], values: torch.Tensor, *layout: Any) -> torch.Tensor:
    """Move a value and wait for that: its time is its own, and not that of who reads it."""
    moved = target(values, *layout)
    for device in accelerators_of([values, moved]):
        transfers_of(device).wait()
    return moved


def _same(value: Any) -> Any:
    return value


def _dying(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For every node, the values that nobody reads after it."""
    dying: dict[fx.Node, list[fx.Node]] = {}
    read_later: set[fx.Node] = set()
    for node in reversed(nodes):
        read = dict.fromkeys(node.all_input_nodes)
        last_reads = [source for source in read if source not in read_later]
        dying[node] = [*last_reads, *([] if node in read_later else [node])]
        read_later.update(read)
    return dying


class _Values:
    """The values of one run, by node; inputs that are not in memory are made when they are first read."""

    def __init__(self, inputs: "_Inputs") -> None:
        self._inputs = inputs
        self.made: dict[fx.Node, Any] = {}

    def __getitem__(self, node: fx.Node) -> Any:
        if node.op != "placeholder":
            return self.made[node]
        if node not in self.made:
            self.made[node] = self._inputs.value(node)
        return self.made[node]


class _Inputs:
    """Real values for the inputs of a captured graph."""

    def __init__(self, graph: fx.Graph, model: nn.Module, sample: Sample) -> None:
        states = states_by_name(model)
        leaves = sample.leaves()
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        with _torch.no_modes():  # the trace may be open
            self._given = {node.name: _given(node, states, leaves) for node in placeholders}
        tensors = tensors_in(list(self._given.values()))
        if any(isinstance(tensor, _torch.FakeTensor) for tensor in tensors):
            raise InvalidModel(
                f"this {type(model).__name__} or its sample has no memory, so its steps cannot be run and timed; "
                "use memfit.measure.roofline.roofline_times, which estimates from sizes"
            )
        self.devices = accelerators_of(tensors)

    def value(self, node: fx.Node) -> Any:
        given = self._given[node.name]
        return _made_up(node.meta["val"]) if given is _TO_BE_MADE else given


_TO_BE_MADE = object()  # stands for the gradients that a backward pass starts from


def _given(node: fx.Node, states: Mapping[str, torch.Tensor], leaves: list[Any]) -> Any:
    description = node.meta["desc"]
    path = getattr(description, "target", "").removeprefix(ROOT + ".")
    value = node.meta.get("val")
    if path in states:
        return states[path].detach()
    if type(description).__name__ == "PlainAOTInput":
        value = leaves[description.idx]
        return value.detach() if isinstance(value, torch.Tensor) else value
    return _TO_BE_MADE if isinstance(value, torch.Tensor) else value


def _made_up(value: torch.Tensor) -> torch.Tensor:
    """A tensor of this layout, such as a gradient to start from: random, or zeros where it could be indices.

    Not ones: what follows may cancel them (`x - x.mean()`), and comparing zeros would prove nothing.
    """
    count = value.untyped_storage().nbytes() // value.element_size()
    content = torch.zeros(count, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point:
        content.normal_(generator=torch.Generator(value.device).manual_seed(0))
    return content.as_strided(value.shape, value.stride(), value.storage_offset())


def _microseconds(start: Any, end: Any) -> float:
    if isinstance(start, torch.Event):
        return float(start.elapsed_time(end)) * 1e3
    return float(end - start) * 1e6
