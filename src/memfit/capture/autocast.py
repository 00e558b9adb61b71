"""Autocast in the forward pass alone.

Note [Backward outside autocast]
    A loop calls the model under autocast and `backward` outside of it, and some backward formulas round differently
    inside. So whatever memfit runs or traces has autocast on in the forward pass and off in the backward pass.

Note [Autocast of the call]
    A loss that is given may switch autocast on by itself, around its call of the model, where nothing of that is seen
    outside of the loss. So the model is captured under what is on where the loss calls it, and the loss itself is run
    under what is on where it was given.

Note [Casts once]
    Autocast casts a parameter once, keeps the cast while its outermost block lasts, and so adds up the gradients of all
    uses in the lower precision. A trace of torch's casts at every use. So it is noted whether a forward runs in such a
    block; operators below autocast cannot tell.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memfit.accelerator import kinds, without_autocast

Autocast = tuple[tuple[str, torch.dtype], ...]  # what it casts to, by kind of device, where it is on


def autocast_state() -> Autocast:
    """What autocast does here and now."""
    devices = [device for device in kinds() if torch.is_autocast_enabled(device)]
    return tuple((device, torch.get_autocast_dtype(device)) for device in devices)


@contextlib.contextmanager
def autocast(state: Autocast, *, enabled: bool = True) -> Iterator[None]:
    """Switch it on, or off, for a while."""
    with contextlib.ExitStack() as stack:
        for device, dtype in state:
            cached = torch.is_autocast_cache_enabled()
            stack.enter_context(torch.autocast(device, dtype, enabled=enabled, cache_enabled=cached))
        yield


@contextlib.contextmanager
def autocast_as(state: Autocast, *, cached: bool) -> Iterator[None]:
    """Have autocast as it was elsewhere for a while: on for what the state names, off for all others."""
    with contextlib.ExitStack() as stack:
        if autocast_state() != state:
            stack.enter_context(without_autocast())
        if autocast_state() != state or cached != torch.is_autocast_cache_enabled():
            for device, dtype in state:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=cached))
        yield


@contextlib.contextmanager
def casts_noted(noted: list[bool]) -> Iterator[None]:
    """Add an item for every autocast block entered meanwhile that casts: whether it keeps casts of parameters."""
    own = torch.autocast.__enter__

    def enter(block: torch.autocast) -> Any:
        entered = own(block)
        if autocast_state():
            noted.append(torch.is_autocast_cache_enabled())
        return entered

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = own  # type: ignore[method-assign]
