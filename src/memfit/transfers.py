"""Copies between an accelerator and the host, beside what the accelerator computes.

Note [A stream of its own]
    Copies of a device run on one stream of their own, in the order in which they are asked for: what was sent to the
    host is there before it is brought back. That stream waits for what the step has computed so far, and whoever reads
    what comes back waits for its copy alone (`arrived`). Memory of the device that a copy reads or writes is noted with
    the allocator (`record_stream`): freed at once as the step counts it, and handed out again when the copy is over.
    An allocator that would run out before then waits for it.

Note [Pinned]
    Only pinned memory of the host is copied while the host goes on. Torch keeps it for the next step, in blocks of
    powers of two.
"""

import functools

import torch

from memfit.accelerator import indexed

_ARRIVAL = "_memfit_arrival"


class Transfers:
    """The copies of one device, see Note [A stream of its own]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def to_host(self, values: torch.Tensor, place: torch.Tensor | None = None) -> torch.Tensor:
        """Start to copy values into a place in pinned memory, a new one if none is given."""
        if place is None:
            place = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, pin_memory=True)
        self._follow()
        with self._stream:
            place.copy_(values, non_blocking=True)
        values.record_stream(self._stream)
        return place

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Start to copy what is in pinned memory; `arrived` must be asked before it is read."""
        here = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=self._device)
        self._follow()
        with self._stream:
            here.copy_(values, non_blocking=True)
            event = self._stream.record_event()
        here.record_stream(self._stream)
        setattr(here, _ARRIVAL, event)
        return here

    def wait(self) -> None:
        """Let what is computed from now on wait for all copies."""
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def _follow(self) -> None:
        """Let copies wait for what was computed so far."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))


def transfers_of(device: torch.device) -> Transfers:
    """Return the copies of a device."""
    return _transfers_of(indexed(device))


@functools.cache
def _transfers_of(device: torch.device) -> Transfers:
    return Transfers(device)


def arrived(values: torch.Tensor) -> torch.Tensor:
    """Let what is computed from now on wait for a copy that was started, and return the same tensor."""
    event = vars(values).pop(_ARRIVAL, None)
    if event is not None:
        torch.accelerator.current_stream(values.device).wait_event(event)
    return values
