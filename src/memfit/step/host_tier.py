"""A tier in host memory for state of parameters on an accelerator, pinned so that copies run beside the computation."""

from concurrent.futures import Future

import torch

from memfit.step.tiers import Place


class HostTier:
    """Tensors in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"

    def reserve(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Place:
        return Place(tensor=torch.empty(shape, dtype=dtype, pin_memory=self._pinned), device=device)

    def read(self, place: Place, rows: slice | None) -> "Future[torch.Tensor]":
        done: Future[torch.Tensor] = Future()
        part = _part(place, rows)
        here = torch.empty_like(part, device=self._device)
        done.set_result(here.copy_(part, non_blocking=True))
        return done

    def write(self, place: Place, rows: slice | None, value: torch.Tensor) -> None:
        # In the order of the device's stream: a later read of the same part sees it.
        _part(place, rows).copy_(value, non_blocking=True)

    def wait(self) -> None:
        if self._pinned:
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """The memory goes with its tensors."""


def _part(place: Place, rows: slice | None) -> torch.Tensor:
    return place.tensor if rows is None else place.tensor.view(-1)[rows]
