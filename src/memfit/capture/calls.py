"""What the parts of a model are called with in one eager step.

Note [Noting]
    The step is run for real, because what cannot be traced depends on real values. Arguments are kept as they were
    given, cut off from the graph that led to them, in memory or in a file beside what autograd saves. What every call
    returned is watched until the backward pass has ended, because a part can only stand in for itself if gradients
    reach all it returns, and if nobody writes into what it may keep.
"""

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.capture.autocast import Autocast, autocast_state
from memfit.capture.borders import Edge, Uses, all_uses, are_added_otherwise, edges_of, uses_inside
from memfit.capture.gradient_layouts import Axes, Starts, axes_of
from memfit.capture.outputs import take_apart
from memfit.capture.rehearse import nothing_remains, step
from memfit.capture.sample import Sample, cut_off
from memfit.capture.spilled import SavedTensors, SpillFile, is_plain, lasting_tensors
from memfit.capture.state import copied
from memfit.capture.with_loss import WithLoss
from memfit.tensors import tensors_in

Loss = tuple[Callable[[Any, Any], Any], Any]  # a function of model and batch, and a batch


@dataclasses.dataclass(kw_only=True)
class NotedCall:
    """One call of a part of a model."""

    given: Callable[[], Sample]  # reads what it was called with, from the file if there is one
    with_gradients: bool  # gradients were on, and it was in the forward pass
    autocast: Autocast
    returned: int = 0  # tensors that require a gradient
    arrived: dict[int, Axes | None] = dataclasses.field(default_factory=dict)  # by place; None: as that is laid out
    knows_arrivals: bool = True  # else gradients of what the model itself returns come from no loss of the user's
    overwritten: bool = False  # what it was given or returned was changed in place before the backward pass
    adds_otherwise: bool = False  # gradients would be added in another order, see `borders.py`

    @property
    def reached(self) -> int:
        """How many of the tensors that require a gradient got one."""
        return len(self.arrived)

    @property
    def starts(self) -> Starts:
        """How gradients of what it returned came, see Note [Gradients of outputs]; () if laid out as that is."""
        if all(axes is None for axes in self.arrived.values()):
            return ()
        return tuple(self.arrived.get(place) for place in range(max(self.arrived) + 1))

    @property
    def sample(self) -> Sample:
        return self.given()


def noted_calls(
    model: nn.Module,
    sample: Sample,
    *,
    seed: int = 0,
    backward_from: str = "auto",
    of: Sequence[nn.Module] | None = None,
    checkpointed: Sequence[nn.Module] = (),
    file: SpillFile | None = None,
    loss: Loss | None = None,
) -> dict[str, list[NotedCall]]:
    """Run one eager step and note every call of every part by its path; the model stays as it is.

    `of` are the only parts to note. What is `checkpointed` keeps nothing for its backward pass meanwhile; of its own
    parts nothing may be asked then. With a `file`, what is saved and what is noted is kept there, not in memory. With
    a `loss`, a function and a batch for it, the backward pass starts there; without, nothing is known of how the
    gradients of what the model returns are laid out.
    """
    saved = None if file is None else SavedTensors(file, lasting_tensors(model, sample))
    notes = _Notes(model, of, saved, knows_loss=loss is not None)
    subject, given = (model, sample) if loss is None else (WithLoss(model, loss[0]), Sample((loss[1],)))
    with contextlib.ExitStack() as stack:
        stack.enter_context(nothing_remains(model, sample, keep=copied if file is None else file.keep))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(notes.following())
        stack.enter_context(_keeping_nothing(checkpointed))
        if saved is not None:
            stack.enter_context(saved.active())
        step(subject, given, seed=seed, backward_from=backward_from, before_backward=notes.turn_around)
    return dict(notes.calls)


@contextlib.contextmanager
def _keeping_nothing(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Checkpoint modules for a while, inside their hooks."""
    before = [(module, module.__dict__.get("forward")) for module in modules]
    for module in modules:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield
    finally:
        for module, forward in before:
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward


class _Notes:
    def __init__(
        self, model: nn.Module, of: Sequence[nn.Module] | None, saved: SavedTensors | None, *, knows_loss: bool
    ) -> None:
        self._saved, self._knows_loss = saved, knows_loss
        self.calls: dict[str, list[NotedCall]] = defaultdict(list)
        wanted = None if of is None else set(of)
        self._paths = {module: path for path, module in model.named_modules() if wanted is None or module in wanted}
        self._running: list[NotedCall] = []
        self._versions: list[tuple[NotedCall, torch.Tensor, int]] = []
        self._given: list[list[Edge]] = []  # of the calls that are running
        self._borders: list[tuple[NotedCall, Uses]] = []
        self._returned: list[tuple[NotedCall, int, Edge]] = []  # tensors of parts, until the model itself returns
        self._in_forward = True

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """What forwards are given and return: hooks of the user run before the one, after the other."""
        hooks = [each.register_forward_pre_hook(self._enter, with_kwargs=True) for each in self._paths]
        hooks += [each.register_forward_hook(self._leave, prepend=True) for each in self._paths]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sample = cut_off(args, kwargs)
        call = NotedCall(
            given=(lambda: sample) if self._saved is None else self._saved.keep_sample(sample),
            with_gradients=torch.is_grad_enabled() and self._in_forward,
            autocast=autocast_state(),
        )
        self.calls[self._paths[module]].append(call)
        self._running.append(call)
        self._given.append(edges_of(tensors_in((args, kwargs))))
        self._watch(call, sample.tensors())

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        call, given = self._running.pop(), self._given.pop()
        if not call.with_gradients:
            return
        try:
            tensors, _ = take_apart(output)
        except ValueError:  # what it returns cannot be looked into, so nothing is known to reach it
            call.returned += 1
            return
        self._watch(call, [tensor.detach() for tensor in tensors])
        self._look_at_border(module, call, given, edges_of(tensors))
        for place, tensor in enumerate(tensors):
            if tensor.requires_grad:
                call.returned += 1
                self._returned.append((call, place, edges_of([tensor])[0]))
                tensor.register_hook(functools.partial(_note_arrival, call, place, axes_of(tensor)))

    def _look_at_border(self, module: nn.Module, call: NotedCall, given: list[Edge], outputs: list[Edge]) -> None:
        """Count uses inside a part; when the model itself returns, compare them with all there are."""
        if self._paths[module]:
            self._borders.append((call, uses_inside(outputs, given)))
            return
        everywhere = all_uses(outputs)
        for each, place, edge in self._returned:
            if edge in outputs:
                each.arrived[place] = None
                each.knows_arrivals = self._knows_loss
        self._returned.clear()
        for each, inside in self._borders:
            each.adds_otherwise = are_added_otherwise(inside, everywhere)
        self._borders.clear()

    def _watch(self, call: NotedCall, tensors: list[torch.Tensor]) -> None:
        if self._in_forward:
            counters = tensors if self._saved is None else [_version_of(tensor) for tensor in tensors]
            self._versions += [(call, counter, counter._version) for counter in counters]

    def turn_around(self) -> None:
        self._in_forward = False
        for call, tensor, version in self._versions:
            call.overwritten = call.overwritten or tensor._version != version
        self._versions.clear()
        self._borders.clear()
        self._returned.clear()


def _note_arrival(call: NotedCall, place: int, own: Axes | None, gradient: torch.Tensor) -> None:
    """Note how a gradient comes, if that is not from a loss which is made up."""
    axes = axes_of(gradient)
    is_made_up = place in call.arrived and not call.knows_arrivals
    call.arrived[place] = None if is_made_up or axes == own else axes


def _version_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that counts what is written into another one, and does not keep its memory."""
    if not is_plain(tensor):
        return tensor
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter
