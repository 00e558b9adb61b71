"""The exact peak of a real run, from the allocator's own events.

On CPU the profiler reports every allocation and release with its size, also those inside an
operator; finalizers report the releases of what was allocated before. On CUDA the caching
allocator keeps the maximum itself, and its history the timeline.
"""

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memfit._memory_events import MemoryRecorder, PriorStorages, cuda_memory_events, memory_events
from memfit.tensors import parts_of, storage_bytes, tensors_in


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPeak:
    """What a run really used."""

    peak_bytes: int
    resident_bytes: int  # what the run started with
    live_bytes: tuple[int, ...] = dataclasses.field(repr=False)  # after every allocation and release


def measure_peak(run: Callable[[], Any], *, resident: Iterable[Any]) -> MeasuredPeak:
    """Run once and report the peak of live bytes.

    `resident` holds what is in memory already and counts towards the peak, until the run releases it: modules,
    optimizers, tensors, or containers of them. Releases of what is not among it do not count.
    """
    tensors = list(_tensors(resident))
    resident_bytes = storage_bytes(tensors)
    on_cuda = any(tensor.is_cuda for tensor in tensors)
    before = prior_storages(tensors)
    del resident, tensors  # a reference held here would keep alive what the run releases
    gc.collect()
    if on_cuda:
        before.stop()
        return _measure_cuda(run, resident_bytes)
    live = tuple(itertools.accumulate(memory_events(run, before), initial=resident_bytes))
    return MeasuredPeak(peak_bytes=max(live), resident_bytes=resident_bytes, live_bytes=live)


def _measure_cuda(run: Callable[[], Any], resident_bytes: int) -> MeasuredPeak:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    live = tuple(itertools.accumulate(cuda_memory_events(run), initial=resident_bytes))
    rise_bytes = torch.cuda.max_memory_allocated() - before_bytes
    return MeasuredPeak(peak_bytes=resident_bytes + rise_bytes, resident_bytes=resident_bytes, live_bytes=live)


class PeakWatch:
    """The peak of live bytes between `start` and `stop`, for loops that somebody else runs.

    It does nothing, and `stop` returns None, while another profiler is running.
    """

    def __init__(self) -> None:
        self._recorder: MemoryRecorder | None = None
        self._resident_bytes = 0
        self._before_bytes: int | None = None  # on CUDA

    @property
    def running(self) -> bool:
        return self._recorder is not None or self._before_bytes is not None

    def start(self, *, resident: Iterable[Any], beside_bytes: int = 0) -> None:
        """`resident` is what lives already and counts, as in `measure_peak`; `beside_bytes` what cannot be given."""
        tensors = list(_tensors(resident))
        self._resident_bytes = storage_bytes(tensors) + beside_bytes
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before_bytes = torch.cuda.memory_allocated()
        elif MemoryRecorder.is_free():
            gc.collect()  # what is garbage now would be counted as freed by the step
            self._recorder = MemoryRecorder(prior_storages(tensors))
            self._recorder.start()

    def stop(self) -> MeasuredPeak | None:
        recorder, before_bytes = self._recorder, self._before_bytes
        self._recorder = self._before_bytes = None
        if before_bytes is not None:
            rise_bytes = torch.cuda.max_memory_allocated() - before_bytes
            live: tuple[int, ...] = (self._resident_bytes, self._resident_bytes + rise_bytes)
        elif recorder is not None:
            changes = (change_bytes for label, change_bytes in recorder.stop() if not label)
            live = tuple(itertools.accumulate(changes, initial=self._resident_bytes))
        else:
            return None
        return MeasuredPeak(peak_bytes=max(live), resident_bytes=self._resident_bytes, live_bytes=live)


def prior_storages(holders: Iterable[Any]) -> PriorStorages:
    """Follow the storages of what modules, optimizers, tensors and containers hold, for a recording to see releases."""
    parts = (part for tensor in _tensors(holders) for part in parts_of(tensor))
    return PriorStorages(part.untyped_storage() for part in parts)


def held_bytes(holders: Iterable[Any]) -> int:
    """Bytes of all distinct storages held by modules, optimizers, tensors and containers."""
    return storage_bytes(list(_tensors(holders)))


def _tensors(holders: Iterable[Any]) -> Iterator[torch.Tensor]:
    for holder in holders:
        if isinstance(holder, nn.Module):
            yield from holder.parameters()
            yield from holder.buffers()
        elif isinstance(holder, torch.optim.Optimizer):
            yield from tensors_in(list(holder.state.values()))
        else:
            yield from tensors_in(holder)
