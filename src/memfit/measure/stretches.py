"""The live bytes of a real run, stretch by stretch between marks."""

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from memfit._memory_events import change_of, marked_memory_events
from memfit.accelerator import accelerator_of
from memfit.measure.peak import held_bytes, prior_storages
from memfit.tensors import tensors_in


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStretch:
    """What a run used between two marks, or between a mark and one of its ends."""

    label: str  # of the mark it starts with; "" at the start of the run
    start_bytes: int
    peak_bytes: int
    end_bytes: int


def measure_stretches(run: Callable[[], Any], *, resident: Iterable[Any]) -> list[MeasuredStretch]:
    """Run once; `resident` is what is in memory already, as in `measure_peak`.

    What is in a file for a while counts as if it were in memory, see Note [As if in memory] in `capture/spilled.py`.
    """
    holders = list(resident)
    device = accelerator_of(tensors_in(_states(holders)))
    start_bytes = held_bytes(holders)
    before = prior_storages(holders, device)
    del resident, holders  # a reference held here would keep alive what the run releases
    gc.collect()
    stretches: list[MeasuredStretch] = []
    label, peak_bytes, now_bytes = "", start_bytes, start_bytes
    for mark, change_bytes in [*_with_spilled(marked_memory_events(run, before, device)), ("end", 0)]:
        now_bytes += change_bytes
        peak_bytes = max(peak_bytes, now_bytes)
        if mark:
            stretches.append(
                MeasuredStretch(label=label, start_bytes=start_bytes, peak_bytes=peak_bytes, end_bytes=now_bytes)
            )
            label, start_bytes, peak_bytes = mark, now_bytes, now_bytes
    return stretches


def _with_spilled(events: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Put changes of what is in a file among those of memory.

    Storages are said to be gone a moment before their release. So what a run would have more from there on counts from
    the next event that is no release.
    """
    waiting_bytes = 0
    for mark, change_bytes in events:
        spilled_bytes = change_of(mark)
        if spilled_bytes is not None:
            waiting_bytes += spilled_bytes
            continue
        if waiting_bytes and (mark or change_bytes > 0 or waiting_bytes < 0):
            yield "", waiting_bytes
            waiting_bytes = 0
        yield mark, change_bytes
    yield "", waiting_bytes


def _states(holders: list[Any]) -> list[Any]:
    return [
        [*holder.parameters(), *holder.buffers()] if isinstance(holder, torch.nn.Module) else holder
        for holder in holders
    ]
