"""Run a step on tensors without memory just as eager runs it, and write down what it takes and releases, and when.

Note [As eager runs it]
    A trace makes a graph that is functional: what writes in place writes a new value there, and how long a value is
    held by a variable of the model's code or by a formula of autograd is lost. So what eager takes is not told from
    a trace. Here the model's own code and autograd's own formulas run as ever, on fake tensors that Python and autograd
    hold exactly as they would hold real ones. Only what formulas do otherwise because their tensors are of a subclass
    differs. A model whose forward asks for values cannot be run so.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit import _torch
from memfit._memory_events import MemoryRecorder
from memfit.alone import alone
from memfit.capture.autocast import autocast, autocast_state, drop_casts
from memfit.capture.eager_formulas import EagerFormulas
from memfit.capture.journal import Journal, WrittenOver
from memfit.capture.outputs import differentiated, take_apart
from memfit.capture.real_layouts import real_layouts
from memfit.capture.record import KnownValues, Mark, ModuleStack, model_frames, user_line
from memfit.capture.sample import Sample, check_sample
from memfit.capture.snapshot import Snapshot
from memfit.collecting import collected_later
from memfit.errors import MemfitError, first_line
from memfit.ir import Graph, Kind, Program
from memfit.tensors import tensors_in
from memfit.trees import map_tensors

log = logging.getLogger(__name__)

aten = torch.ops.aten
_ASKS_FOR_A_VALUE = aten._local_scalar_dense.default


def eager_step(
    model: nn.Module, sample: Sample, *, backward_from: str = "auto", backward: bool = True
) -> tuple[Graph, Program] | None:
    """Return what one forward and backward pass takes and releases; None if it cannot be run without values.

    Without a backward pass gradients are switched on as they are around this call.
    """
    check_sample(model, sample, trains=backward)
    snapshot = Snapshot(model)
    try:
        with (
            alone(),
            MemoryRecorder.paused(),
            collected_later(),
            torch.set_grad_enabled(backward or torch.is_grad_enabled()),
            _torch.inference_without_gradients(),
            _torch.compiled_as_written(),
            torch.random.fork_rng([]),
        ):
            return _Run(model, sample, snapshot).step(backward_from if backward else None)
    except MemfitError:
        raise
    except Exception as error:  # what goes wrong goes wrong in a trace as well, which explains it
        log.info("not run without memory (%s: %s)", type(error).__name__, first_line(error))
        return None
    finally:
        snapshot.restore()


class _Run:
    """One step of a model, with fake tensors in the place of its parameters, its buffers and its batch."""

    def __init__(self, model: nn.Module, sample: Sample, snapshot: Snapshot) -> None:
        self._model, self._snapshot = model, snapshot
        self._mode = _torch.detect_fake_mode(list(model.parameters())) or _torch.FakeTensorMode(
            allow_non_fake_inputs=True
        )
        self._journal = Journal()
        self._states = {name: self._fake(each) for name, each in _states(model)}
        self._counters = [(self._states[name], each) for name, each in model.named_buffers() if _counts(each)]
        self._sample = Sample(*map_tensors(self._fake, (sample.args, dict(sample.kwargs))))
        self._note_residents(model, sample)

    def step(self, backward_from: str | None) -> tuple[Graph, Program]:
        """Run forward and backward; None: forward alone."""
        modules = ModuleStack(self._model)
        writer = _Writer(self._journal, modules, self._counters)
        state = autocast_state()
        with (
            _torch.failures_unlogged(),
            real_layouts(),
            _torch.with_states(self._model, self._states),
            modules.following(),
            autocast(state, enabled=False),
            self._mode,
            writer,
            EagerFormulas(),
        ):
            outputs = [self._forward(state)]
            held, starts = self._starts(outputs, backward_from)
            if backward_from is not None:
                self._journal.begin_backward()
                _backward(starts)
            writer.check()
            return self._journal.finish(held, self._gradients())

    def _forward(self, state: Any) -> Any:
        with autocast(state):
            output = self._model(*self._sample.args, **self._sample.kwargs)
            drop_casts()
        return output

    def _starts(self, outputs: list[Any], backward_from: str | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Take the output out of a list, and return what the loop holds and what is differentiated."""
        tensors, _ = take_apart(outputs.pop())
        if backward_from is None:
            return tensors, []
        return tensors, [tensors[index] for index in differentiated(tensors, backward_from)]

    def _gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for leaf in (*self._states.values(), *tensors_in((self._sample.args, dict(self._sample.kwargs)))):
            if leaf.grad is not None:
                yield leaf, leaf.grad

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, _torch.FakeTensor):
            return tensor.detach().requires_grad_(tensor.requires_grad)
        return self._mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)

    def _note_residents(self, model: nn.Module, sample: Sample) -> None:
        names = {id(each) for each in model.parameters()}
        for name, each in _states(model):
            kind = Kind.PARAMETER if id(each) in names else Kind.BUFFER
            mark = Mark(module=name.rpartition(".")[0], source="", in_place=False)
            self._journal.add_resident(self._states[name], name, kind, mark)
        for name, each in zip(sample.leaf_names(), self._sample.leaves(), strict=True):
            if isinstance(each, torch.Tensor):
                self._journal.add_resident(each, name, Kind.BATCH, Mark(module="", source="", in_place=False))


def _states(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _counts(buffer: torch.Tensor) -> bool:
    """Return whether a buffer is a number that a forward may ask for, as that of the batches that a norm has seen."""
    return buffer.dim() == 0 and not buffer.is_floating_point() and not isinstance(buffer, _torch.FakeTensor)


def _backward(starts: Sequence[torch.Tensor]) -> None:
    """Differentiate a loss, or a model's outputs with gradients that nobody holds."""
    loss = starts[0] if len(starts) == 1 and starts[0].dim() == 0 else _Loss.apply(*starts)
    loss.backward()


class _Loss(torch.autograd.Function):
    """Stands in for the loss of a model that has none."""

    @staticmethod
    def forward(ctx: Any, *starts: torch.Tensor) -> torch.Tensor:
        ctx.kinds = [(start.shape, start.dtype, start.device) for start in starts]
        return starts[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds)


class _Writer(TorchDispatchMode):
    """Gives a journal every operator that runs, and answers questions about values that are known."""

    def __init__(
        self, journal: Journal, modules: ModuleStack, counters: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        super().__init__()
        self._journal, self._modules = journal, modules
        self._known = KnownValues()
        for fake, counter in counters:
            self._known.remember(fake, counter.clone())
        self._marks: dict[int, Mark] = {}  # by the number of the node that autograd makes of a call
        self._failure: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operator. What fails in noting is kept: torch asks for a device where nothing may be raised."""
        kwargs = kwargs or {}
        if func is _ASKS_FOR_A_VALUE and (answer := self._known.answer(args[0])) is not None:
            return answer
        noted = self._noting(func, args)
        result = func(*args, **kwargs)
        if noted is not None:
            try:
                self._known.follow(func, args, kwargs, result)
                self._journal.write(func, args, kwargs, result, noted[0], node=_node_number(), over=noted[1])
            except Exception as error:
                self._failure = self._failure or error
        return result

    def _noting(self, func: Any, args: Any) -> tuple[Mark, WrittenOver] | None:
        """Return what is to be known before an operator runs; None if noting has failed."""
        try:
            return None if self._failure else (self._mark(), self._written_over(func, args))
        except Exception as error:
            self._failure = error
            return None

    def check(self) -> None:
        """Raise what failed in noting."""
        if self._failure is not None:
            raise self._failure

    def _written_over(self, func: Any, args: Any) -> WrittenOver:
        """Return whether eager writes over the first argument, see Note [Written over] in `journal.py`."""
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not (maker := self._journal.maker(first)):
            return WrittenOver.NO
        node = _torch.current_node()
        if node is None:  # `linear` and its bias
            is_linear = func is aten.add.Tensor and maker in _PRODUCTS and _is_bias(args[1])
            return WrittenOver.YES if is_linear else WrittenOver.NO
        if self._is_of_another_node(first):  # gradients are added up, unless the first is a view
            is_whole = not first._is_view() and first.nbytes == first.untyped_storage().nbytes()
            return WrittenOver.IF_LAST if func is aten.add.Tensor and is_whole else WrittenOver.NO
        in_formula = func in _IN_PLACE_FORMULAS.get(_torch.node_name(node), ())
        in_zeros = func.overloadpacket in _SCATTERS and maker in _ZEROS
        return WrittenOver.YES if in_formula or in_zeros else WrittenOver.NO

    def _is_of_another_node(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a gradient that another node of autograd has made."""
        made_by = self._journal.node(tensor)
        return made_by is not None and made_by != _node_number()

    def _mark(self) -> Mark:
        node = _torch.current_node()
        if node is not None and not self._modules.innermost:
            return self._marks.get(node._sequence_nr(), _NO_MARK)
        mark = Mark(module=self._modules.innermost, source=user_line(model_frames()), in_place=False)
        return self._marks.setdefault(_torch.node_number() - 1, mark)


def _node_number() -> int | None:
    """Return the number of the node of autograd that is running."""
    node = _torch.current_node()
    return None if node is None else node._sequence_nr()


def _is_bias(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.is_leaf and given.dim() == 1


_NO_MARK = Mark(module="", source="", in_place=False)
_PRODUCTS = ("aten.mm.default", "aten.bmm.default")
_ZEROS = ("aten.zeros.default", "aten.new_zeros.default", "aten.zeros_like.default")
_SCATTERS = (aten.index_put, aten.scatter_add, aten.index_add, aten.scatter)
_IN_PLACE_FORMULAS = {
    "BinaryCrossEntropyWithLogitsBackward0": (aten.sub.Tensor, aten.mul.Tensor, aten.div.Scalar, aten.div.Tensor),
    "MaximumBackward0": (aten.masked_fill.Scalar,),
    "MinimumBackward0": (aten.masked_fill.Scalar,),
}
