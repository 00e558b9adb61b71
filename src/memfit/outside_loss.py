"""Measure a loss that the caller computes outside of the model, see Note [Loss outside] in `ir.py`.

Note [Loss by itself]
    The loss is run once, with its backward pass, on zeros in the place of the model's outputs. That shows what lives at
    every moment between the two passes of the model, whatever Python holds, and what is left when the gradients of the
    outputs have come. Outputs that the model's own backward pass reads are held meanwhile, as a captured call holds
    them. Where nothing can be run, the step is traced with the loss in it and simulated. That is done first too where
    the budget leaves little room: a loss that does not fit is not run.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memfit import _torch
from memfit._memory_events import set_mark
from memfit.accelerator import without_autocast
from memfit.capture.gradient_layouts import Axes, Starts, axes_of, starting_in
from memfit.capture.lower import lower
from memfit.capture.outputs import differentiated, take_apart
from memfit.capture.real_layouts import real_layouts
from memfit.capture.rehearse import nothing_remains
from memfit.capture.sample import Sample
from memfit.capture.trace import Joint, traced
from memfit.capture.with_loss import WithLoss
from memfit.describe import is_fake, is_for_accelerator
from memfit.errors import CaptureError, InvalidInput, first_line
from memfit.execute.kinds import states_of
from memfit.execute.values import Values
from memfit.ir import Graph, Kind, LossMemory
from memfit.measure.devices import Device
from memfit.measure.peak import held_bytes
from memfit.measure.stretches import measure_stretches
from memfit.plan.identity import identity_program
from memfit.plan.simulate import simulate
from memfit.recipe import OutsideLoss
from memfit.tensors import storage_bytes
from memfit.trees import leaves_of

log = logging.getLogger(__name__)

_LOSS, _BACKWARD = "loss", "backward"  # marks: the model has returned, its backward pass begins
_LIKELY_SHARE = 4  # of the outputs: what a loss takes with them as a rule, and seldom more
_NOTHING = LossMemory(working_bytes=0, lasting_bytes=0, batch_bytes=0, output_bytes=0)


def loss_memory(
    loss: OutsideLoss,
    model: nn.Module,
    sample: Sample,
    joint: Joint,
    graph: Graph,
    *,
    device: Device | None = None,
    room_bytes: int | None = None,
) -> LossMemory:
    """Tell what a loss takes beside a traced call of the model.

    Args:
        loss: The loss and its batch, or what is known of it.
        model: The model.
        sample: What the loss calls the model with.
        joint: The trace of that call.
        graph: The same, lowered.
        device: Where the step is to run, if that is not here.
        room_bytes: What a run of the loss may allocate; None: as much as it takes.

    """
    if loss.function is None:
        assert loss.memory is not None
        return loss.memory.scaled(graph.output_bytes)
    if device is not None or is_fake(model, sample) or is_for_accelerator(model, None):
        return dataclasses.replace(_simulated(loss, model, graph), starts=joint.starts)
    if room_bytes is not None and _LIKELY_SHARE * graph.output_bytes > room_bytes:
        with contextlib.suppress(CaptureError):
            simulated = _simulated(loss, model, graph)
            if graph.output_bytes + simulated.working_bytes > room_bytes:
                return dataclasses.replace(simulated, starts=joint.starts)
    return _measured(loss, model, sample, joint, graph)


def starts_of_backward(loss: OutsideLoss | None, model: nn.Module, sample: Sample, joint: Joint) -> tuple[str, Starts]:
    """Find where the backward pass of a traced call starts: from which outputs, and in which layouts.

    The loss is run on tensors without memory. One that looks at values tells nothing: it may read all outputs.

    Returns:
        What `backward_from` is to be, and the layouts, see Note [Gradients of outputs]; () if they are as usual.

    """
    if loss is None:
        return joint.backward_from, ()
    if loss.function is None:
        return joint.backward_from, () if loss.memory is None else loss.memory.starts
    outputs = [node.meta["val"] for node in _outputs(joint)]
    if not any(each.dim() for each in outputs):
        return joint.backward_from, ()
    is_chosen = joint.backward_from == "auto" and joint.undifferentiated
    try:
        with _torch.no_modes(), nothing_remains(model, sample):
            arrived = _arriving_axes(loss, model, joint, outputs)
    except Exception as error:
        log.info("how gradients of the outputs arrive is not known: %s", first_line(error))
        return ("all" if is_chosen else joint.backward_from), ()
    backward_from = "all" if is_chosen and not arrived.keys() <= {*joint.differentiated} else joint.backward_from
    starts = tuple(arrived.get(place) for place in range(len(outputs)))
    usual = all(axes is None or axes == axes_of(each) for axes, each in zip(starts, outputs, strict=True))
    return backward_from, () if usual else starts


def _arriving_axes(
    loss: OutsideLoss, model: nn.Module, joint: Joint, outputs: Sequence[torch.Tensor]
) -> dict[int, Axes | None]:
    """By output: the axes of its gradient, if one arrives."""
    assert loss.function is not None
    arrived: dict[int, Axes | None] = {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in outputs]
        for place in (*joint.differentiated, *joint.undifferentiated):
            tensors[place].requires_grad_()
            tensors[place].register_hook(lambda gradient, place=place: arrived.update({place: axes_of(gradient)}))
        return _returned(model, joint, tensors, args, kwargs, functools.partial(_without_memory, fakes))

    fakes = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    with _torch.failures_unlogged(), fakes, real_layouts(), torch.enable_grad(), forward_as(model, forward):
        scalar_of(loss.function(model, loss.batch)).backward()
    return arrived


def _without_memory(mode: _torch.FakeTensorMode, given: Any) -> Any:
    """Return what stands for a parameter or an argument that a model returns: gradients may reach it."""
    return mode.from_tensor(given) if isinstance(given, torch.Tensor) and given.requires_grad else given


def _returned(
    model: nn.Module,
    joint: Joint,
    tensors: list[torch.Tensor],
    args: Any,
    kwargs: Any,
    stands_for: Callable[[Any], Any] = lambda given: given,
) -> Any:
    """Leave behind and return what a call of the model does, of some tensors."""
    ordered = {name: kwargs[name] for name in joint.keywords}
    given = [*states_of(model), *leaves_of((args, ordered))]
    return joint.results.of(tensors, [stands_for(each) for each in given], args, ordered)


@dataclasses.dataclass
class _Seen:
    """Hold what a run of the loss has shown beside its marks."""

    calls: int = 0
    resident_bytes: int = 0  # of the model and what it is called with
    output_bytes: int = 0
    held: list[torch.Tensor] = dataclasses.field(default_factory=list)  # outputs that the model's backward pass reads
    gradient_bytes: int = 0
    held_bytes: int = 0


def _measured(loss: OutsideLoss, model: nn.Module, sample: Sample, joint: Joint, graph: Graph) -> LossMemory:
    """See Note [Loss by itself]."""
    assert loss.function is not None
    function, seen = loss.function, _Seen()
    with _torch.no_modes():
        start = torch.zeros((), requires_grad=True)
    outputs = _outputs(joint)
    alone = {*graph.returned_alone}
    values = Values(joint.graph_module.graph, graph)
    held = [values.storage(node) not in alone for node in outputs]
    fakes = [node.meta["val"] for node in outputs]

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.calls += 1
        seen.resident_bytes = held_bytes([model, args, kwargs])
        tensors = _StandIn.apply(start, seen, fakes, held, joint)
        set_mark(_LOSS)
        return _returned(model, joint, [*tensors], args, kwargs)

    def run() -> None:
        result = function(model, loss.batch)
        with without_autocast():  # see Note [Backward outside autocast]
            scalar_of(result).backward()
        del result

    with _torch.no_modes(), nothing_remains(model, sample), torch.enable_grad(), forward_as(model, forward):
        stretches = {each.label: each for each in measure_stretches(run, resident=[model, loss.batch])}
    if seen.calls != 1:
        raise InvalidInput(
            f"the loss calls the {type(model).__name__} {seen.calls} times; a plan is for one call in a step: put the "
            "calls into the forward of one module"
        )
    if _BACKWARD not in stretches:
        raise InvalidInput(
            f"no gradient of the loss arrives at the outputs of the {type(model).__name__}; check for detach() or "
            "no_grad() in the loss"
        )
    between = stretches[_LOSS]
    before_bytes = between.start_bytes - seen.output_bytes
    left_bytes = stretches[_BACKWARD].start_bytes - before_bytes - seen.gradient_bytes - seen.held_bytes
    return LossMemory(
        working_bytes=between.peak_bytes - between.start_bytes,
        lasting_bytes=max(0, left_bytes),
        batch_bytes=max(0, before_bytes - seen.resident_bytes),
        output_bytes=graph.output_bytes,
        starts=joint.starts,
    )


class _StandIn(torch.autograd.Function):
    """Stands in for the model: makes its outputs, of zeros, and takes their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        start: torch.Tensor,
        seen: _Seen,
        fakes: Sequence[torch.Tensor],
        held: Sequence[bool],
        joint: Joint,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        tensors = _zeros_like(fakes)
        seen.output_bytes = storage_bytes(tensors)
        seen.held = [tensor.detach() for tensor, is_held in zip(tensors, held, strict=True) if is_held]
        seen.held_bytes = storage_bytes(seen.held)
        starts = joint.differentiated
        ctx.mark_non_differentiable(*(each for place, each in enumerate(tensors) if place not in starts))
        laid_out = [starting_in(*each) for each in itertools.zip_longest(fakes, joint.starts[: len(fakes)])]
        ctx.seen, ctx.strides = seen, [fake.stride() for fake in laid_out]
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        arrived = zip(gradients, ctx.strides, strict=True)
        # A captured backward pass lays out what it is given as the outputs are, and lets go of what it was given.
        taken = [_laid_out(each, strides) for each, strides in arrived if each is not None]
        set_mark(_BACKWARD)
        ctx.seen.gradient_bytes = storage_bytes([*taken, *gradients])
        ctx.seen.held.clear()
        return None, None, None, None, None


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _zeros_like(fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of zeros that share their memory as others do."""
    storages: dict[int, torch.UntypedStorage] = {}
    tensors = []
    for fake in fakes:
        key = fake.untyped_storage()._cdata
        if key not in storages:
            count = fake.untyped_storage().nbytes()
            storages[key] = torch.zeros(count, dtype=torch.uint8).untyped_storage()
        tensor = torch.empty(0, dtype=fake.dtype)
        tensors.append(tensor.set_(storages[key], fake.storage_offset(), fake.shape, fake.stride()))
    return tensors


def _outputs(joint: Joint) -> list[Any]:
    """The nodes that the model's outputs are, in the order of its template."""
    output = joint.graph_module.graph.output_node()
    nodes: Any = output.args[0]
    found = [
        (description.idx, node)
        for node, description in zip(nodes, output.meta["desc"], strict=True)
        if type(description).__name__ == "PlainAOTOutput"
    ]
    return [node for _, node in sorted(found, key=lambda each: each[0])]


@contextlib.contextmanager
def forward_as(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a function stand for the forward of a model for a while."""
    own = vars(model).get("forward")
    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if own is not None:
            model.__dict__["forward"] = own


def scalar_of(result: Any) -> torch.Tensor:
    """The loss among what a loss returned; the rest is held by the caller to the end of the step."""
    tensors, _ = take_apart(result)
    places = differentiated(tensors, "auto")
    if len(places) != 1 or tensors[places[0]].dim():
        kinds = ", ".join(str(list(each.shape)) for each in tensors) or type(result).__name__
        raise InvalidInput(
            f"the loss returned {kinds}; it is to return one scalar that requires a gradient, and beside it what your "
            "loop holds"
        )
    return tensors[places[0]]


def _simulated(loss: OutsideLoss, model: nn.Module, graph: Graph) -> LossMemory:
    """From a trace of the step with the loss in it: how far its operations rise above the end of the forward pass."""
    assert loss.function is not None
    with traced(WithLoss(model, loss.function), Sample((loss.batch,))) as joint:
        whole = lower(joint)
    own = {each.name for each in whole.operations if each.module.partition(".")[0] == "model"}
    moments = simulate(whole, identity_program(whole)).moments
    highest_bytes = max((each.live_bytes for each in moments if each.label not in own), default=0)
    batch_bytes = _size(whole, whole.resident, Kind.BATCH) - _size(graph, graph.resident, Kind.BATCH)
    alone = simulate(graph, identity_program(graph), loss=_NOTHING).moments
    end_bytes = next(each.live_bytes for each in alone if each.phase == "loss")
    return LossMemory(
        working_bytes=max(0, highest_bytes - end_bytes - batch_bytes),
        lasting_bytes=_size(whole, whole.held, Kind.OUTPUT),
        batch_bytes=max(0, batch_bytes),
        output_bytes=graph.output_bytes,
    )


def _size(graph: Graph, storages: Sequence[int], kind: Kind) -> int:
    return sum(graph.storages[each].size_bytes for each in storages if graph.storages[each].kind is kind)
