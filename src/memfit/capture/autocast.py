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

_CACHE_ENABLED = 3  # its place among the arguments of torch.autocast

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


def drop_casts() -> None:
    """Let go of casts of parameters, as the end of a loop's block does: our step may run inside of one."""
    if autocast_state():
        torch.clear_autocast_cache()


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
def casts_noted(noted: list[bool], *, usual: bool) -> Iterator[None]:
    """Add an item for every autocast block entered meanwhile that casts: whether it keeps casts of parameters.

    `usual` is what blocks do that are not told: they ask when they are made, and a trace answers no.
    """
    block_class: Any = torch.autocast
    make, enter = block_class.__init__, block_class.__enter__
    not_told: list[torch.autocast] = []

    def noting_make(block: torch.autocast, *args: Any, **kwargs: Any) -> None:
        make(block, *args, **kwargs)
        if len(args) <= _CACHE_ENABLED and kwargs.get("cache_enabled") is None:
            not_told.append(block)

    def noting_enter(block: torch.autocast) -> Any:
        entered = enter(block)
        if autocast_state():
            noted.append(usual if any(each is block for each in not_told) else torch.is_autocast_cache_enabled())
        return entered

    block_class.__init__, block_class.__enter__ = noting_make, noting_enter
    try:
        yield
    finally:
        block_class.__init__, block_class.__enter__ = make, enter
