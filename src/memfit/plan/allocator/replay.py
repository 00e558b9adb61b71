"""A recorded history against the simulation: the same requests must land at the same addresses.

Note [Recorded device]
    Where the driver places a segment is not the allocator's choice, so addresses of segments are taken from the
    record. Whether a segment is asked for, when, and how large, is the simulation's answer and is compared. A run of
    released segments is one `empty_cache` or one retry; which segments it releases, and in which order, is compared.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Mapping, Sequence

from memfit.plan.allocator.adopt import adopt
from memfit.plan.allocator.caching import CachingAllocator
from memfit.plan.allocator.device import DeviceMemory
from memfit.plan.allocator.history import Action, Event, MemoryHistory
from memfit.plan.allocator.reclaim import release_segment
from memfit.plan.allocator.start import StartSegment, start_state

_SEGMENTS = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_RELEASES = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_MOST_DIFFERENCES = 100
_MOST_TAILS = 200  # each takes a replay


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One thing that the simulation did otherwise than the record."""

    position: int  # index into the events; after the last: the end state
    what: str
    recorded: int
    simulated: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """What came of a replay."""

    differences: tuple[Difference, ...]  # the first hundred
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    start_allocated_bytes: int
    start_reserved_bytes: int
    block_bytes: Mapping[int, int]  # of every block that was handed out, by the position of its event
    start: Sequence[StartSegment]
    simulated: int  # events that were compared

    @property
    def is_equal(self) -> bool:
        return not self.differences


class _RecordedDevice(DeviceMemory):
    """A driver that gives the segments of the record, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.coming: deque[Event] = deque()
        self.given_back: list[int] = []  # addresses of segments and pages
        self.unexpected: list[int] = []  # sizes that were asked for and are not in the record

    def allocate(self, size_bytes: int) -> int | None:
        if self.coming and self.coming[0].size_bytes == size_bytes:
            return self.coming.popleft().address
        self.unexpected.append(size_bytes)
        return super().allocate(size_bytes)

    def reserve_addresses(self, size_bytes: int) -> int:
        return self.coming[0].address if self.coming else super().reserve_addresses(size_bytes)

    def release(self, address: int, size_bytes: int) -> None:
        self.given_back.append(address)

    def unmap_pages(self, address: int, size_bytes: int) -> None:
        self.given_back.append(address)

    def map_pages(self, address: int, size_bytes: int) -> bool:
        if self.coming and (self.coming[0].address, self.coming[0].size_bytes) == (address, size_bytes):
            self.coming.popleft()
        else:
            self.unexpected.append(size_bytes)
        return True


def replay(history: MemoryHistory) -> Replay:
    """Simulate a history from its start state and compare every step.

    Where the first difference shows a tail that the start state could not tell, see Note [Unsplit tails] in `start.py`,
    the history is replayed with it.
    """
    tails: dict[int, int] = {}
    result = _Replayer(history, start_state(history)).run()
    for _ in range(_MOST_TAILS):
        tail = None if result.is_equal else _shown_tail(history, result)
        if tail is None:
            break
        tails |= tail
        better = _Replayer(history, start_state(history, tails)).run()
        if not better.is_equal and better.differences[0].position <= result.differences[0].position:
            break
        result = better
    return result


def _shown_tail(history: MemoryHistory, result: Replay) -> dict[int, int] | None:
    """Find the block whose tail explains why a request landed further up, or found no room behind it."""
    first = result.differences[0]
    if first.position >= len(history.events):
        return None
    for block in (block for segment in result.start for block in segment.blocks):
        end = block.address + block.size_bytes
        if first.what == "address" and end == first.simulated:
            tail_bytes = first.recorded - first.simulated
            return {block.address: tail_bytes} if 0 < tail_bytes <= block.tail_limit_bytes else None
    return None


class _Replayer:
    """One walk over the events."""

    def __init__(self, history: MemoryHistory, start: Sequence[StartSegment]) -> None:
        self._history = history
        self._start = start
        self._device = _RecordedDevice()
        self._allocator = CachingAllocator(history.settings, self._device)
        adopt(self._allocator, start)
        self._allocator.peak_allocated_bytes = self._allocator.allocated_bytes
        self._differences: list[Difference] = []
        self._moved: dict[int, int] = {}  # where the simulation has what the record has elsewhere
        self._block_bytes: dict[int, int] = {}
        self._position = 0

    def run(self) -> Replay:
        allocator, events = self._allocator, self._history.events
        start_bytes = allocator.allocated_bytes, allocator.reserved_bytes
        while self._position < len(events):
            event = events[self._position]
            if event.action in _RELEASES:
                self._release(self._run_of_releases())
                continue
            self._handle(event)
            self._position += 1
        self._compare("reserved at the end", self._history.reserved_at_end_bytes, allocator.reserved_bytes)
        self._compare("allocated at the end", self._history.allocated_at_end_bytes, allocator.allocated_bytes)
        return Replay(
            differences=tuple(self._differences[:_MOST_DIFFERENCES]),
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            start_allocated_bytes=start_bytes[0],
            start_reserved_bytes=start_bytes[1],
            block_bytes=self._block_bytes,
            start=self._start,
            simulated=len(events),
        )

    def _handle(self, event: Event) -> None:
        if event.action is Action.ALLOC:
            self._allocate(event)
        elif event.action in _SEGMENTS:
            self._device.coming.append(event)
        elif event.action is Action.FREE_REQUESTED:
            address = self._moved.get(event.address, event.address)
            if self._is_known(address, event):
                self._allocator.request_free(address)
        elif event.action is Action.FREE_COMPLETED:
            address = self._moved.pop(event.address, event.address)
            if self._is_known(address, event):
                self._allocator.complete_free(address)

    def _allocate(self, event: Event) -> None:
        address = self._allocator.allocate(event.size_bytes, event.stream)
        self._block_bytes[self._position] = self._allocator.blocks[address].size_bytes
        for size_bytes in self._device.unexpected:
            self._compare("a segment that the record does not have", 0, size_bytes)
        for coming in self._device.coming:
            self._compare("a segment that the simulation does not need", coming.size_bytes, 0)
        self._device.unexpected.clear()
        self._device.coming.clear()
        if address != event.address:
            self._compare("address", event.address, address)
            self._moved[event.address] = address

    def _is_known(self, address: int, event: Event) -> bool:
        known = address in self._allocator.blocks
        if not known:
            self._compare("a release of what is not in use", event.address, 0)
        return known

    def _run_of_releases(self) -> list[Event]:
        events, stop = self._history.events, self._position
        while stop < len(events) and events[stop].action in _RELEASES:
            stop += 1
        return list(events[self._position : stop])

    def _release(self, recorded: list[Event]) -> None:
        """Empty the cache, and compare what went back with the record."""
        if any(event.action is Action.SEGMENT_UNMAP for event in recorded):
            self._device.given_back.clear()
            self._allocator.empty_cache()
            expected = self._device.given_back
        else:
            expected = self._release_named(recorded)
        for event, address in itertools.zip_longest(recorded, expected):
            self._compare("released segment", 0 if event is None else event.address, address or 0)
            self._position += event is not None

    def _release_named(self, recorded: list[Event]) -> list[int]:
        """Release what the record names, which may be less than everything; return what emptying would release."""
        free = {
            block.address: block
            for pool in (self._allocator.large, self._allocator.small)
            for block in pool.free_blocks()
            if not block.is_split
        }
        for event in recorded:
            if event.address in free:
                release_segment(self._allocator, free[event.address])
        return list(free)

    def _compare(self, what: str, recorded: int, simulated: int) -> None:
        if recorded != simulated:
            difference = Difference(position=self._position, what=what, recorded=recorded, simulated=simulated)
            self._differences.append(difference)
