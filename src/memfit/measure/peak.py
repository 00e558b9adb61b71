"""The exact peak of a real run, from the allocator's own events.

On CPU the profiler reports every allocation and release with its size, also those inside an
operator; finalizers report the releases of what was allocated before. On an accelerator the
caching allocator keeps the maximum itself, and the profiler reports what it hands out.
"""

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memfit._memory_events import MemoryRecorder, PriorStorages, memory_events
from memfit.accelerator import MemoryWatch, accelerator_of, blocks_bytes, synchronize
from memfit.tensors import parts_of, storage_bytes, storage_key, tensors_in


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPeak:
    """What a run really used."""

    peak_bytes: int
    resident_bytes: int  # what the run started with
    live_bytes: tuple[int, ...] = dataclasses.field(repr=False)  # after every allocation and release


def measure_peak(run: Callable[[], Any], *, resident: Iterable[Any]) -> MeasuredPeak:
    """Run once and report the peak of live bytes.

    `resident` holds what is in memory already and counts towards the peak, until the run releases it: modules,
    optimizers, tensors, or containers of them. Releases of what is not among it do not count; on an accelerator
    they do, so nothing else should be released there meanwhile.
    """
    tensors = list(_tensors(resident))
    device = accelerator_of(tensors)
    resident_bytes = bytes_on(device, tensors)
    before = prior_storages(tensors, device)
    del resident, tensors  # a reference held here would keep alive what the run releases
    gc.collect()
    if device is not None:
        return _measure_on(device, run, resident_bytes, before)
    live = tuple(itertools.accumulate(memory_events(run, before), initial=resident_bytes))
    return MeasuredPeak(peak_bytes=max(live), resident_bytes=resident_bytes, live_bytes=live)


def _measure_on(
    device: torch.device, run: Callable[[], Any], resident_bytes: int, before: PriorStorages
) -> MeasuredPeak:
    watch = MemoryWatch(device)

    def run_to_its_end() -> None:
        run()
        synchronize(device)

    live = tuple(itertools.accumulate(memory_events(run_to_its_end, before, device), initial=resident_bytes))
    # What is released and not resident lowers the one, what threads of others take is missing in the other.
    peak_bytes = max(resident_bytes + watch.rise_bytes(), *live)
    return MeasuredPeak(peak_bytes=peak_bytes, resident_bytes=resident_bytes, live_bytes=live)


class PeakWatch:
    """The peak of live bytes between `start` and `stop`, for loops that somebody else runs.

    It does nothing, and `stop` returns None, while another profiler is running.
    """

    def __init__(self) -> None:
        self._recorder: MemoryRecorder | None = None
        self._resident_bytes = 0
        self._watch: MemoryWatch | None = None  # on an accelerator

    @property
    def running(self) -> bool:
        return self._recorder is not None or self._watch is not None

    def start(self, *, resident: Iterable[Any], beside_bytes: int = 0) -> None:
        """`resident` is what lives already and counts, as in `measure_peak`; `beside_bytes` what cannot be given."""
        tensors = list(_tensors(resident))
        device = accelerator_of(tensors)
        self._resident_bytes = bytes_on(device, tensors) + beside_bytes
        if device is not None:
            self._watch = MemoryWatch(device)
        elif MemoryRecorder.is_free():
            gc.collect()  # what is garbage now would be counted as freed by the step
            self._recorder = MemoryRecorder(prior_storages(tensors))
            self._recorder.start()

    def stop(self) -> MeasuredPeak | None:
        recorder, watch = self._recorder, self._watch
        self._recorder = self._watch = None
        if watch is not None:
            live: tuple[int, ...] = (self._resident_bytes, self._resident_bytes + watch.rise_bytes())
        elif recorder is not None:
            changes = (change_bytes for label, change_bytes in recorder.stop() if not label)
            live = tuple(itertools.accumulate(changes, initial=self._resident_bytes))
        else:
            return None
        return MeasuredPeak(peak_bytes=max(live), resident_bytes=self._resident_bytes, live_bytes=live)


def prior_storages(holders: Iterable[Any], device: torch.device | None = None) -> PriorStorages:
    """Follow the storages of what modules, optimizers, tensors and containers hold, for a recording to see releases.

    Of an accelerator, those that are there.
    """
    parts = [part for tensor in _tensors(holders) for part in parts_of(tensor)]
    if device is None:
        return PriorStorages(part.untyped_storage() for part in parts)
    return PriorStorages(part.untyped_storage() for part in parts if part.device == device)


def bytes_on(device: torch.device | None, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all distinct storages: of an accelerator, the blocks of those that are there; of a CPU, of all."""
    if device is None:
        return storage_bytes(list(tensors))
    parts = (part for tensor in tensors for part in parts_of(tensor) if part.device == device)
    return sum({storage_key(part): blocks_bytes(part.untyped_storage().nbytes()) for part in parts}.values())


def held_bytes(holders: Iterable[Any]) -> int:
    """Bytes of all distinct storages held by modules, optimizers, tensors and containers, on the device of these."""
    tensors = list(_tensors(holders))
    return bytes_on(accelerator_of(tensors), tensors)


def _tensors(holders: Iterable[Any]) -> Iterator[torch.Tensor]:
    for holder in holders:
        if isinstance(holder, nn.Module):
            yield from holder.parameters()
            yield from holder.buffers()
        elif isinstance(holder, torch.optim.Optimizer):
            yield from tensors_in(list(holder.state.values()))
        else:
            yield from tensors_in(holder)
