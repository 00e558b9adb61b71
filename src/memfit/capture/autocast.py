"""Autocast in the forward pass alone.

Note [Backward outside autocast]
    A loop calls the model under autocast and `backward` outside of it, and some backward formulas round differently
    inside. So whatever memfit runs or traces has autocast on in the forward pass and off in the backward pass.
"""

import contextlib
from collections.abc import Iterator

import torch

from memfit.accelerator import kinds

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
