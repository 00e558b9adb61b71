"""A module and a sample in, one ATen graph of forward and backward out."""

import contextlib
import dataclasses
import functools
import itertools
import operator
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from memfit import _torch
from memfit._memory_events import MemoryRecorder
from memfit.alone import alone, others_run
from memfit.capture.arguments import GivenArguments, Results, containers_in
from memfit.capture.asked import Originals
from memfit.capture.autocast import autocast, autocast_state, casts_noted
from memfit.capture.borders import places_of_inner, reaches_otherwise, uses_of
from memfit.capture.diagnose import explain
from memfit.capture.effects import Effect, Left
from memfit.capture.gradient_layouts import Starts, starting_in, take_out_copies
from memfit.capture.guards import Guards
from memfit.capture.hooks import hooks_left_out
from memfit.capture.late_reads import LateReads
from memfit.capture.layout import ChannelsLast, lies_channels_last
from memfit.capture.numbers import Numbers
from memfit.capture.outputs import OutputTemplate, Parts, differentiated, without_gradient
from memfit.capture.questions import Answers, Questions
from memfit.capture.reads import Reads
from memfit.capture.real_layouts import real_layouts
from memfit.capture.record import ANNOTATION, ModuleStack, Recorder
from memfit.capture.refusals import Refusals, check_no_attributes, refusing
from memfit.capture.sample import Sample, check_sample
from memfit.capture.snapshot import Snapshot
from memfit.capture.state import draws_put_back
from memfit.capture.states import buffers_by_place, first_names, keep_buffers, state_names, states_of_calls
from memfit.capture.tied_gradients import add_up_as_eager
from memfit.collecting import collected_later
from memfit.errors import CaptureError, InvalidInput, MemfitError, first_line
from memfit.ops.number import NotFollowed
from memfit.tensors import tensors_in
from memfit.trees import is_record, map_tensors

ROOT = "model"  # the name under which _Subject holds the captured module


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joint:
    """A traced forward and backward pass. Can be turned into a callable inside `traced` only."""

    export: _torch.JointWithDescriptors
    input_names: list[str]  # of the sample's leaves
    keywords: tuple[str, ...]  # of the call, in the order in which its graph takes them
    template: OutputTemplate
    differentiated: tuple[int, ...]  # outputs the backward pass starts from
    undifferentiated: tuple[int, ...]  # outputs that require a gradient but are not among them
    backward_from: str = "auto"  # how those outputs were chosen, see `capture/outputs.py`
    cast_anew: tuple[str, ...] = ()  # parameters that autocast casts once and the trace at every use
    avoided_values: bool = False  # traced with `tracing_flags`: libraries may have taken another way than eager
    guards: Guards = dataclasses.field(default_factory=lambda: Guards([], []))  # what the forward has read
    effects: tuple[Effect, ...] = ()  # what it leaves behind
    takes_containers: bool = False  # it returns, or writes into, lists and dictionaries that it is given
    numbers: Numbers = dataclasses.field(default_factory=Numbers)  # that calls take anew
    starts: Starts = ()  # layouts of the gradients of outputs, where they are not those of the outputs
    state_names: tuple[str, ...] = ()  # of parameters, then of buffers, as calls are given them
    uses: tuple[tuple[int, ...], ...] = ()  # by place of what calls are given: when it was used, in ascending numbers
    inner: tuple[int, ...] = ()  # outputs that others are computed from
    late: LateReads = dataclasses.field(default_factory=LateReads)  # what runs in the backward pass reads
    questions: Questions = dataclasses.field(default_factory=Questions)  # that the forward asks about its arguments
    tells_none_apart: bool = False  # a function is told which of its results get no gradient, and that varies
    arrivals: tuple[int, ...] = ()  # states and arguments, by place, in the order in which they get their gradients
    name: str = "the model"  # of its class
    seconds: float = 0.0  # that tracing took

    @property
    def graph_module(self) -> fx.GraphModule:
        graph_module: fx.GraphModule = self.export.graph_module
        return graph_module

    @property
    def results(self) -> Results:
        """Leave behind and return what a call does."""
        return Results(self.template, self.effects, self.takes_containers)

    @property
    def changes_arguments(self) -> bool:
        """Whether the forward writes into what it is given, beside parameters and buffers."""
        return not self._changed_kinds <= {"BufferAOTInput", "ParamAOTInput"}  # bases of views of arguments too

    @property
    def changes_parameters(self) -> bool:
        """Whether the forward writes into parameters, as that of a momentum encoder does."""
        return "ParamAOTInput" in self._changed_kinds

    @property
    def changed_names(self) -> set[str]:
        """The names of what the forward writes into."""
        states = {each.target.removeprefix(f"{ROOT}.") for each in self._changed if hasattr(each, "target")}
        return states | {self.input_names[each.idx] for each in self._changed if hasattr(each, "idx")}

    @property
    def _changed_kinds(self) -> set[str]:
        return {type(description).__name__ for description in self._changed}

    @property
    def _changed(self) -> list[Any]:
        """Descriptions of what is given to the forward and written into."""
        results = self.graph_module.graph.output_node().meta["desc"]
        changed = [getattr(description, "mutated_input", None) for description in results]
        return [description for description in changed if description is not None]


@contextlib.contextmanager
def traced(
    model: nn.Module,
    sample: Sample,
    *,
    backward_from: str = "auto",
    with_hooks: bool = True,
    outputs: str = "all",
    channels_last: bool = False,
    starts: Starts = (),
    runs: bool = True,
) -> Iterator[Joint]:
    """Trace one forward and backward pass of `model` on `sample`; nothing is computed.

    `outputs="loss"` returns `None` in the place of every output the backward pass does not start from.
    `with_hooks=False` leaves out the hooks of the model itself (not of its parts), for a trace that
    will run inside them. `channels_last` lays out images as convolutions want them, see `layout.py`. `starts` are the
    layouts in which gradients of outputs come, see Note [Gradients of outputs] in `gradient_layouts.py`. With
    `runs=False` the trace is only looked at, and may be of a forward that does more than a captured call can do again.
    """
    check_sample(model, sample)
    if outputs not in ("all", "loss"):
        raise InvalidInput(f'outputs is "all" or "loss", {outputs!r} was given')
    with alone(), contextlib.ExitStack() as stack:
        start = time.monotonic()
        stack.enter_context(hooks_left_out(model))
        # Only around the forward: who compiles the trace moves iterators of libraries, which count what they do.
        with draws_put_back(model, sample) as clear_caches:
            snapshot = Snapshot(model)
            stack.callback(snapshot.restore)
            subject = _Subject(
                model, sample, clear_caches, snapshot, backward_from, with_hooks, outputs, channels_last, starts, runs
            )
            stack.callback(subject.reads.restore)
            stack.callback(subject.numbers.restore)
            joint = _export(stack, subject, _as_fake_as(model, sample))
        subject.reads.restore()
        snapshot.restore()  # torch puts back what it traced with by name, which forgets parts that have two
        stack.callback(_torch.forget_real_tensors, joint.export)
        yield dataclasses.replace(joint, seconds=time.monotonic() - start)


def _export(stack: contextlib.ExitStack, subject: "_Subject", sample: Sample) -> Joint:
    try:
        with collected_later():
            return _export_once(stack, subject, sample)
    except _torch.DataDependentOutputException:
        # Libraries that look at values often have a way around it for traces. It may compute
        # more than the eager run does, so it is only taken when the eager way is closed.
        with _torch.tracing_flags():
            return _export_once(stack, subject, sample, last_try=True)


def _export_once(stack: contextlib.ExitStack, subject: "_Subject", sample: Sample, *, last_try: bool = False) -> Joint:
    try:
        # Closed on any error, also on Ctrl-C: a half-finished trace leaves fake modes behind.
        with (
            MemoryRecorder.paused(),
            torch.enable_grad(),
            warnings.catch_warnings(),
            contextlib.ExitStack() as attempt,
        ):
            # Autograd's own account of a failure; ours follows.
            warnings.filterwarnings("ignore", message="Error detected in")
            # See Note [Backward outside autocast] in `autocast.py`.
            with autocast(subject.autocast, enabled=False), real_layouts(), _torch.scripts_inlined():
                with subject.numbers.giving():
                    export = _torch.export_joint(attempt, subject, tuple(sample.leaves()), {})
                subject.numbers.restore()
                guards = subject.guards()
                subject.numbers.mark(export.graph_module.graph)
            stack.enter_context(attempt.pop_all())
    except MemfitError:
        raise
    except Exception as error:
        if isinstance(error, _torch.DataDependentOutputException) and not last_try:
            raise
        if subject.numbers.places:
            raise NotFollowed(first_line(error)) from error
        name = type(subject.model).__name__
        raise explain(error, model_name=name, module=subject.module_stack.innermost) from error
    assert subject.template is not None
    _check_dense(type(subject.model).__name__, export.graph_module.graph)
    _check_no_generators(type(subject.model).__name__, export.graph_module.graph)
    _restore_shared_results(export.graph_module.graph)
    add_up_as_eager(export.graph_module.graph)
    if subject.copied:
        take_out_copies(export.graph_module.graph, subject.copied)
    return Joint(
        export=export,
        input_names=sample.leaf_names(),
        keywords=tuple(sample.kwargs),
        template=subject.template,
        differentiated=subject.differentiated,
        undifferentiated=subject.undifferentiated,
        backward_from=subject.backward_from,
        cast_anew=_cast_anew(export.graph_module, subject.first_names) if subject.casts_once else (),
        avoided_values=last_try,
        guards=guards,
        effects=subject.effects,
        takes_containers=subject.takes_containers,
        numbers=subject.numbers,
        starts=subject.starts,
        late=subject.late,
        questions=subject.questions,
        tells_none_apart=subject.tells_none_apart,
        inner=subject.inner,
        uses=subject.uses,
        arrivals=tuple(subject.arrivals),
        state_names=tuple(state_names(subject.model)),
        name=type(subject.model).__name__,
    )


class _Subject(nn.Module):
    """The module as it is traced: flat outputs, recorded calls, one backward start."""

    def __init__(
        self,
        model: nn.Module,
        sample: Sample,
        clear_caches: Callable[[], None],
        snapshot: "Snapshot",
        backward_from: str,
        with_hooks: bool,
        outputs: str,
        channels_last: bool,
        starts: Starts,
        runs: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self._sample = sample
        self._clear_caches = clear_caches
        self._snapshot = snapshot
        self._with_hooks = with_hooks
        self.module_stack = ModuleStack(model)
        self.backward_from = backward_from
        self._outputs = outputs
        self._channels_last = channels_last
        self.starts = starts
        self.copied: tuple[int, ...] = ()  # outputs that are traced through a copy
        self._runs = runs
        self._keeps_casts = torch.is_autocast_cache_enabled()  # asked here: a trace switches it off
        self._finds_anomalies = torch.is_anomaly_enabled()  # and this one on
        self.casts_once = False  # see Note [Casts once] in `autocast.py`
        self.autocast = autocast_state()
        self.template: OutputTemplate | None = None
        self.differentiated: tuple[int, ...] = ()
        self.undifferentiated: tuple[int, ...] = ()
        self.numbers = Numbers()
        self.reads = Reads(model, self.numbers)
        for each in containers_in(sample.args, dict(sample.kwargs)):
            if is_record(each):
                self.reads.note_class(type(each))
        self._generator = torch.get_rng_state()
        self._contents: list[tuple[str, tuple[Any, ...]]] = []  # after the forward
        self.effects: tuple[Effect, ...] = ()
        self.takes_containers = False
        self._own_states = states_of_calls(model)
        self._originals = Originals(model, self.reads.note, self.reads.note_absent)
        self.arrivals: list[int] = []
        self.late = LateReads()
        self.questions = Questions()
        self.tells_none_apart = False
        self.inner: tuple[int, ...] = ()
        self.uses: tuple[tuple[int, ...], ...] = ()
        self.first_names = first_names(model)
        self._traces = 0
        self.training = model.training

    def forward(self, *leaves: Any) -> tuple[torch.Tensor, ...]:
        self._clear_caches()
        self.numbers.restore()
        self._snapshot.restore_attributes()  # the forward is traced more than once
        self.reads.restore()
        states = states_of_calls(self.model)
        arguments = GivenArguments(self._sample, leaves, states, self._own_states)
        self._note_arrivals([*states, *arguments.leaves])
        noted: list[bool] = []  # autocast blocks of the model's own
        casts = functools.partial(any, (self.autocast, noted))
        asked = slice(0 if self.numbers.places else None)  # numbers that calls take anew are no part of a question
        answers = Answers(leaves[asked], arguments.own[asked], self._sample.leaf_names())
        recorder = Recorder(self.module_stack, self.reads.ran, casts=casts, answers=answers, runs=self._runs)
        tensors_given = [*arguments.tensors, *states]
        for each in self.model.parameters():
            each._is_param = True  # what `isinstance(each, nn.Parameter)` looks at
        answering: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        refusals: contextlib.AbstractContextManager[Refusals] = contextlib.nullcontext(Refusals())
        if self._runs:
            refusals = refusing(again=self._traces > 0, given=tensors_given, anomaly=self._finds_anomalies)
            self._originals.stand_in(arguments.leaves, arguments.own)
            self._originals.stand_in(states, self._own_states)
            answering = self._originals.answering(self.reads.codes())
        self._traces += 1
        with (
            self.module_stack.following(),
            _torch.eager_dispatch(),
            recorder,
            self.reads.following(),
            answering,
            refusals as refused,
        ):
            buffers = buffers_by_place(self.model)
            in_layout = ChannelsLast() if self._channels_last else contextlib.nullcontext()
            self.numbers.begin()
            with autocast(self.autocast), casts_noted(noted, usual=self._keeps_casts), in_layout:
                output = (self.model if self._with_hooks else self.model.forward)(*arguments.args, **arguments.kwargs)
            self.late = LateReads.of(tensors_in(output), refused)
            self.numbers.restore()
            keep_buffers(self.model, buffers)
        self.casts_once = any(noted) or (bool(self.autocast) and self._keeps_casts)
        given = [*states_of_calls(self.model), *arguments.leaves]
        if self._runs:
            check_no_attributes(tensors_in(output), "it returns")
            check_no_attributes(tensors_given, "it is given or holds")
        left = self._left_behind(recorder, arguments, len(given)) if self._runs else []
        self._contents = self._read_contents()
        parts = self._parts([output, *(each.value for each in left)], given, arguments)
        self.template = parts.output(output)
        tensors = [*parts.tensors]
        if self._channels_last and not any(map(lies_channels_last, leaves)):
            tensors = [each.contiguous() if lies_channels_last(each) else each for each in tensors]
        self.differentiated = differentiated(tensors, self.backward_from)
        if self._outputs == "loss":
            self.template = self.template.only(self.differentiated)
            tensors = [tensors[index] for index in self.differentiated]
            parts.keep(self.differentiated)
            self.differentiated = tuple(range(len(tensors)))
        self.effects = tuple(each.effect(parts) for each in left)
        self.takes_containers = parts.takes_from(len(given)) or any(each.given is not None for each in left)
        left_tensors = parts.tensors[len(tensors) :]
        places = range(len(tensors), len(parts.tensors))
        self.differentiated += tuple(
            place for place, each in zip(places, left_tensors, strict=True) if each.requires_grad
        )
        tensors += left_tensors
        if not self.differentiated:
            raise without_gradient(type(self.model).__name__)
        starts = [tensors[place] for place in self.differentiated]
        self.tells_none_apart = any(reaches_otherwise(each, starts) for each in refused.asking_for_none)
        self.inner = tuple(places_of_inner(tensors))
        self.uses = tuple(uses_of(tensors, given))
        self.questions = answers.questions
        self.numbers.follow()  # functions of the backward pass may read them, too
        self.undifferentiated = tuple(
            index for index, tensor in enumerate(tensors) if tensor.requires_grad and index not in self.differentiated
        )
        laid_out = [
            starting_in(tensor, axes) if index in self.differentiated else tensor
            for index, (tensor, axes) in enumerate(itertools.zip_longest(tensors, self.starts[: len(tensors)]))
        ]
        places = range(len(tensors))
        self.copied = tuple(place for place in places if laid_out[place] is not tensors[place])
        return tuple(each if index in self.differentiated else each.detach() for index, each in enumerate(laid_out))

    def _note_arrivals(self, given: Sequence[Any]) -> None:
        """Note which of the tensors a call is given get their gradients when, see `execute/gradient_order.py`."""
        self.arrivals.clear()
        for place, each in enumerate(given):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(lambda _, place=place: self.arrivals.append(place))

    def guards(self) -> Guards:
        """Return guards of all the forward has read; ValueError if a captured call cannot do as it does."""
        if not self._runs:
            return Guards([], [])
        for (name, was), (_, now) in zip(self._contents, self._read_contents(), strict=False):
            if len(was) != len(now) or any(one is not other for one, other in zip(was, now, strict=True)):
                raise ValueError(
                    f"a hook or a function of the backward pass changes {name}, which a captured call would not do "
                    "again"
                )
        return self.reads.guards(self.numbers.places)

    def _read_contents(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [*self._snapshot.contents(), *self.reads.contents()] if self._runs else []

    def _parts(self, values: list[Any], given: list[Any], arguments: GivenArguments) -> Parts:
        """Return what takes apart all that a call makes."""
        kept = [each for _, each in self.reads.held()] if self._runs else []
        parts = Parts(values, [*given, *arguments.containers], kept)
        parts.output(values[0])
        needs_grad = any(each.requires_grad for each in parts.tensors)
        if not needs_grad:  # but a parameter, which is returned
            given = [None if isinstance(each, torch.Tensor) else each for each in given]
        return Parts(values, [*given, *arguments.containers], kept)

    def _left_behind(self, recorder: Recorder, arguments: GivenArguments, first: int) -> list[Left]:
        """Return the things the forward has left behind; ValueError if a call cannot do that again.

        `first` is the place of the first container among what a call is given.
        """
        is_alone = not others_run()  # else it may have been another thread that drew
        if (drawn := self._snapshot.drawn()) and (is_alone or self.reads.may_draw()):
            raise ValueError(
                f"the forward draws from {' and '.join(drawn)}, which a captured call would not do again; draw with "
                "torch"
            )
        with _torch.no_modes():
            now = torch.get_rng_state()
            was_seeded = not torch.equal(now, self._generator) and (is_alone or _is_seeded(now, self._generator))
        if was_seeded:
            raise ValueError("the forward seeds torch's generator, which a captured call would not do again")
        held = self.reads.held()
        arguments.check_apart({id(each): path for path, each in held})
        return [*self.reads.left_behind(recorder.known_value), *arguments.left(first)]


def _is_seeded(state: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether a generator was seeded since, or may have been, rather than drawn from."""
    seeded = torch.Generator()
    seeded.set_state(state)
    earlier = torch.Generator()
    earlier.set_state(before)
    if seeded.initial_seed() != earlier.initial_seed():
        return True
    return torch.equal(torch.Generator().manual_seed(seeded.initial_seed()).get_state(), state)


def _check_dense(name: str, graph: fx.Graph) -> None:
    """Refuse tensors without plain memory, whose sizes depend on values."""
    for node in graph.nodes:
        if any(each.layout is not torch.strided and not each.is_mkldnn for each in tensors_in(node.meta.get("val"))):
            module, where = _place_of(node)
            raise CaptureError(
                f"{name} could not be captured: {node.target}{where} makes a sparse tensor, whose size depends on "
                "values; use dense ones (nn.Embedding(..., sparse=False))",
                module=module,
            )


def _check_no_generators(name: str, graph: fx.Graph) -> None:
    """Refuse draws from a generator that the forward makes: the trace holds the one of its own run."""
    for node in graph.nodes:
        drawn = isinstance(node.target, torch._ops.OpOverload) and node.kwargs.get("generator")
        if isinstance(drawn, fx.Node):
            module, where = _place_of(node)
            raise CaptureError(
                f"{name} could not be captured: {node.target}{where} draws from a generator of its own, which a "
                "captured call does not; draw from torch's own generator",
                module=module,
            )


def _place_of(node: fx.Node) -> tuple[str, str]:
    """Return the module of a node, and words that say where it is."""
    mark = (node.meta.get("custom") or {}).get(ANNOTATION)
    return ("", "") if mark is None else (mark.module, f" in module {mark.module!r} at {mark.source}")


def _restore_shared_results(graph: fx.Graph) -> None:
    """Let results that the operator gives twice be one value in the trace too.

    Fake tensors remember what an operator made by its arguments, and forget that two of its results are the
    same memory: oneDNN's LSTM layer gives one gradient for both of its biases.
    """
    for node in graph.nodes:
        first, second = _SHARED_RESULTS.get(node.target, (0, 0))
        if first == second:
            continue
        values = list(node.meta["val"])
        values[second] = values[first]
        node.meta["val"] = tuple(values)
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == second:
                user.meta["val"] = values[first]


_SHARED_RESULTS = {torch.ops.aten.mkldnn_rnn_layer_backward.default: (3, 4)}


def _cast_anew(graph_module: fx.GraphModule, first: Mapping[str, str]) -> tuple[str, ...]:
    """Parameters that are cast to one dtype more than once, under whatever names: `first` has the one to say.

    Outside a trace autocast keeps the first cast and adds up gradients in the lower precision;
    in a trace every use casts and gradients are added up in full precision.
    """
    casts = Counter(
        (first[node.args[0].meta["desc"].target.removeprefix(ROOT + ".")], node.kwargs.get("dtype"))
        for node in graph_module.graph.nodes
        if node.target is torch.ops.aten._to_copy.default
        and type(node.args[0].meta.get("desc")).__name__ == "ParamAOTInput"
    )
    return tuple(path for (path, _), count in casts.items() if count > 1)


def _as_fake_as(model: nn.Module, sample: Sample) -> Sample:
    """If the model has no weights in memory, the sample need not be there either."""
    mode = _torch.detect_fake_mode(list(model.parameters()))
    if mode is None:
        return sample
    args, kwargs = map_tensors(lambda tensor: _fake(mode, tensor), (sample.args, dict(sample.kwargs)))
    return Sample(args, kwargs)


def _fake(mode: _torch.FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, _torch.FakeTensor) else mode.from_tensor(tensor)
