"""A tier in host memory for state of parameters on an accelerator, pinned so that copies run beside the computation."""

from concurrent.futures import Future

import torch

from memfit.accelerator import is_accelerator, synchronize
from memfit.step.tiers import Place
from memfit.transfers import arrived, transfers_of


class HostTier:
    """Tensors in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._transfers = transfers_of(device) if is_accelerator(device) else None

    def reserve(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Place:
        return Place(tensor=torch.empty(shape, dtype=dtype, pin_memory=self._transfers is not None), device=device)

    def read(self, place: Place, rows: slice | None) -> "Future[torch.Tensor]":
        part = _part(place, rows)
        return _Arriving(part.clone() if self._transfers is None else self._transfers.to_device(part))

    def write(self, place: Place, rows: slice | None, value: torch.Tensor) -> None:
        if self._transfers is None:
            _part(place, rows).copy_(value)
        else:  # in the order of the stream of copies: a later read of the same part sees it
            self._transfers.to_host(value, _part(place, rows))

    def wait(self) -> None:
        synchronize(self._device)

    def close(self) -> None:
        """The memory goes with its tensors."""


class _Arriving(Future[torch.Tensor]):
    """A copy that was started; whoever asks for it lets what is computed next wait for it, not the host."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.set_result(values)

    def result(self, timeout: float | None = None) -> torch.Tensor:
        return arrived(super().result(timeout))


def _part(place: Place, rows: slice | None) -> torch.Tensor:
    return place.tensor if rows is None else place.tensor.view(-1)[rows]
