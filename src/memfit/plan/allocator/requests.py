"""A sequence of requests under any settings: what it peaks at, what it reserves, and which setting reserves least."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from memfit.plan.allocator.caching import CachingAllocator, OutOfDeviceMemory
from memfit.plan.allocator.device import DeviceMemory
from memfit.plan.allocator.history import Action, MemoryHistory
from memfit.plan.allocator.settings import AllocatorSettings
from memfit.plan.allocator.start import StartSegment, start_state


class Allocate(NamedTuple):
    """Ask for memory; `handle` names it from then on."""

    handle: int
    size_bytes: int
    stream: int = 0


class Release(NamedTuple):
    """Let what a handle names go."""

    handle: int


class EmptyCache(NamedTuple):
    """Give everything back that is cached, as `torch.cuda.empty_cache` does."""


Request = Allocate | Release | EmptyCache

# What people set, beside the defaults; the first of equals is advised, so simpler ones come first.
USUAL_SETTINGS = tuple(
    AllocatorSettings.parse(text)
    for text in (
        "",
        "expandable_segments:True",
        "max_split_size_mb:512",
        "max_split_size_mb:256",
        "max_split_size_mb:128",
        "max_split_size_mb:64",
        "roundup_power2_divisions:8",
        "roundup_power2_divisions:4",
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorRun:
    """What a sequence of requests takes under one setting."""

    settings: AllocatorSettings
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_then_bytes: int  # when most was reserved first
    retries: int  # how often all cached memory was given back to serve a request
    out_of_memory_at: int | None = None  # index of the request that failed; the rest was not run

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes reserved beyond the most that was allocated: what rounding and gaps cost."""
        return self.peak_reserved_bytes - self.peak_allocated_bytes


def run_requests(
    requests: Iterable[Request],
    settings: AllocatorSettings | None = None,
    *,
    capacity_bytes: int | None = None,
) -> AllocatorRun:
    """Simulate requests from an empty allocator on; with a capacity, until it does not serve one."""
    allocator = CachingAllocator(settings, DeviceMemory(capacity_bytes))
    addresses: dict[int, int] = {}
    highest_bytes = allocated_then_bytes = 0
    failed_at = None
    for index, request in enumerate(requests):
        try:
            _serve(allocator, request, addresses)
        except OutOfDeviceMemory:
            failed_at = index
            break
        if allocator.peak_reserved_bytes > highest_bytes:
            highest_bytes, allocated_then_bytes = allocator.peak_reserved_bytes, allocator.allocated_bytes
    return AllocatorRun(
        settings=allocator.settings,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        allocated_then_bytes=allocated_then_bytes,
        retries=allocator.retries,
        out_of_memory_at=failed_at,
    )


def compare_settings(
    requests: Sequence[Request],
    candidates: Sequence[AllocatorSettings] = USUAL_SETTINGS,
    *,
    capacity_bytes: int | None = None,
) -> list[AllocatorRun]:
    """Run requests under several settings, in the order given."""
    return [run_requests(requests, each, capacity_bytes=capacity_bytes) for each in candidates]


def best_run(runs: Sequence[AllocatorRun]) -> AllocatorRun:
    """Choose the run that went through and reserved least; the first of equals."""
    return min(runs, key=lambda run: (run.out_of_memory_at is not None, run.peak_reserved_bytes))


def requests_of(history: MemoryHistory, start: Sequence[StartSegment] | None = None) -> list[Request]:
    """Turn a recorded history into requests: first what was live when it began, by address."""
    state = start_state(history) if start is None else start
    return list(_requests(history, state))


def _requests(history: MemoryHistory, start: Sequence[StartSegment]) -> Iterator[Request]:
    handles: dict[int, int] = {}
    for segment in start:
        for block in segment.blocks:
            handles[block.address] = len(handles)
            yield Allocate(handles[block.address], block.requested_bytes, segment.stream)
    number = len(handles)
    previous = None
    for event in history.events:
        if event.action is Action.ALLOC:
            handles[event.address] = number
            yield Allocate(number, event.size_bytes, event.stream)
            number += 1
        elif event.action is Action.OUT_OF_MEMORY:  # as if it had been served, to see what that takes
            yield Allocate(number, event.size_bytes, event.stream)
            yield Release(number)
            number += 1
        elif event.action is Action.FREE_COMPLETED and event.address in handles:
            yield Release(handles.pop(event.address))
        elif event.action is Action.SEGMENT_FREE and previous is not Action.SEGMENT_FREE:
            yield EmptyCache()
        previous = event.action


def _serve(allocator: CachingAllocator, request: Request, addresses: dict[int, int]) -> None:
    if isinstance(request, Allocate):
        if request.size_bytes:  # nothing is allocated for empty tensors
            addresses[request.handle] = allocator.allocate(request.size_bytes, request.stream)
    elif isinstance(request, Release):
        address = addresses.pop(request.handle, None)
        if address is not None:
            allocator.free(address)
    else:
        allocator.empty_cache()
