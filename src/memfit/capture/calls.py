"""What the parts of a model are called with in one eager step.

Note [Noting]
    The step is run for real, because what cannot be traced depends on real values. Arguments are kept as
    they were given, cut off from the graph that led to them; what every call returned is watched until the
    backward pass has ended, because a part can only stand in for itself if gradients reach all it returns, and
    if nobody writes into what it may keep.
"""

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from memfit.capture.autocast import Autocast, autocast_state
from memfit.capture.outputs import take_apart
from memfit.capture.rehearse import nothing_remains, step
from memfit.capture.sample import Sample


@dataclasses.dataclass(kw_only=True)
class NotedCall:
    """One call of a part of a model."""

    sample: Sample
    with_gradients: bool  # gradients were on, and it was in the forward pass
    autocast: Autocast
    returned: int = 0  # tensors that require a gradient
    reached: int = 0  # of them by a gradient
    overwritten: bool = False  # what it was given or returned was changed in place before the backward pass


def noted_calls(
    model: nn.Module,
    sample: Sample,
    *,
    backward_from: str = "auto",
    of: Sequence[nn.Module] | None = None,
    checkpointed: Sequence[nn.Module] = (),
) -> dict[str, list[NotedCall]]:
    """Run one eager step and note every call of every part by its path; the model stays as it is.

    `of` are the only parts to note. What is `checkpointed` keeps nothing for its backward pass meanwhile; of its own
    parts nothing may be asked then.
    """
    notes = _Notes(model, of)
    with nothing_remains(model, sample), torch.enable_grad(), notes.following(), _keeping_nothing(checkpointed):
        step(model, sample, seed=0, backward_from=backward_from, before_backward=notes.turn_around)
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


def cut_off(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sample:
    """The arguments of a call in the middle of a model, without the graph that led to them."""
    return Sample(
        *pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), (args, kwargs)
        )
    )


class _Notes:
    def __init__(self, model: nn.Module, of: Sequence[nn.Module] | None) -> None:
        self.calls: dict[str, list[NotedCall]] = defaultdict(list)
        wanted = None if of is None else set(of)
        self._paths = {module: path for path, module in model.named_modules() if wanted is None or module in wanted}
        self._running: list[NotedCall] = []
        self._versions: list[tuple[NotedCall, torch.Tensor, int]] = []
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
        call = NotedCall(
            sample=cut_off(args, kwargs),
            with_gradients=torch.is_grad_enabled() and self._in_forward,
            autocast=autocast_state(),
        )
        self.calls[self._paths[module]].append(call)
        self._running.append(call)
        self._watch(call, call.sample.tensors())

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        call = self._running.pop()
        if not call.with_gradients:
            return

        def reached(_gradient: torch.Tensor) -> None:
            call.reached += 1

        try:
            tensors, _ = take_apart(output)
        except ValueError:  # what it returns cannot be looked into, so nothing is known to reach it
            call.returned += 1
            return
        self._watch(call, [tensor.detach() for tensor in tensors])
        for tensor in tensors:
            if tensor.requires_grad:
                call.returned += 1
                tensor.register_hook(reached)

    def _watch(self, call: NotedCall, tensors: list[torch.Tensor]) -> None:
        if self._in_forward:
            self._versions += [(call, tensor, tensor._version) for tensor in tensors]

    def turn_around(self) -> None:
        self._in_forward = False
        for call, tensor, version in self._versions:
            call.overwritten = call.overwritten or tensor._version != version
        self._versions.clear()
