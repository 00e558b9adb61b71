"""The allocator's state when a recording began, worked out backwards from how it ended.

Note [Unsplit tails]
    A recording holds requested sizes, and a block may be larger than its request: in the large pool a remainder of up
    to 1 MiB stays with it. A block that lives to the end tells its size. Of one that was released before, the gap
    to its next neighbour does: free blocks of the large pool are larger than 1 MiB, so a smaller gap is a tail.
    A larger gap may be a tail and a free block. `tails` says how much of it is the tail where that is known; where it
    is not, none is assumed.
"""

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from memfit.plan.allocator.history import Action, EndBlock, Event, MemoryHistory
from memfit.plan.allocator.settings import AllocatorSettings
from memfit.plan.allocator.sizes import MAX_TAIL_BYTES, MIN_BLOCK_BYTES, SMALL_SEGMENT_BYTES, round_request

_LARGE_PAGE_BYTES = 20 * 2**20
_OPPOSITES = {
    Action.SEGMENT_ALLOC: Action.SEGMENT_FREE,
    Action.SEGMENT_FREE: Action.SEGMENT_ALLOC,
    Action.SEGMENT_MAP: Action.SEGMENT_UNMAP,
    Action.SEGMENT_UNMAP: Action.SEGMENT_MAP,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StartBlock:
    """A block that was in use when the recording began."""

    address: int
    requested_bytes: int
    size_bytes: int
    is_waiting: bool = False  # released, and still used by another stream
    frame: int = -1
    tail_limit_bytes: int = 0  # its size may be larger by up to this, see Note [Unsplit tails]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StartSegment:
    """A segment that was there when the recording began."""

    address: int
    size_bytes: int
    stream: int
    is_small: bool
    blocks: tuple[StartBlock, ...]  # those in use, by address; the rest is free
    is_expandable: bool = False


class _InUse(NamedTuple):
    requested_bytes: int
    is_waiting: bool
    frame: int
    size_bytes: int | None  # None: not known, it was released before the end


class MappedRange(NamedTuple):
    """The memory behind a segment, or behind a stretch of an expandable one."""

    size_bytes: int
    stream: int
    is_small: bool
    is_expandable: bool = False


def start_state(history: MemoryHistory, tails: Mapping[int, int] | None = None) -> list[StartSegment]:
    """Undo a recording, last event first."""
    blocks = {
        address: _InUse(block.requested_bytes, not block.is_allocated, block.frame, block.size_bytes)
        for address, block in end_blocks(history)
        if block.is_active
    }
    segments = {
        each.address: MappedRange(each.size_bytes, each.stream, each.is_small, each.is_expandable)
        for each in history.segments
    }
    for event in reversed(history.events):
        _undo_block(blocks, event)
        move_segments(segments, event, undo=True)
    return _with_blocks(segments, blocks, history.settings, tails or {})


def end_blocks(history: MemoryHistory) -> Iterator[tuple[int, EndBlock]]:
    """Yield the blocks that there were at the end, with their addresses."""
    for segment in history.segments:
        address = segment.address
        for block in segment.blocks:
            yield address, block
            address += block.size_bytes


def _undo_block(blocks: dict[int, _InUse], event: Event) -> None:
    if event.action is Action.ALLOC:
        blocks.pop(event.address, None)
    elif event.action is Action.FREE_COMPLETED:
        blocks[event.address] = _InUse(event.size_bytes, True, -1, None)
    elif event.action is Action.FREE_REQUESTED:
        known = blocks.get(event.address)
        size_bytes = None if known is None else known.size_bytes
        blocks[event.address] = _InUse(event.size_bytes, False, -1, size_bytes)


def move_segments(segments: dict[int, MappedRange], event: Event, *, undo: bool = False) -> None:
    """Do to segments, by address, what an event did to them, or undo it."""
    action = _OPPOSITES.get(event.action, event.action) if undo else event.action
    if action is Action.SEGMENT_FREE:
        segments.pop(event.address, None)
    elif action is Action.SEGMENT_ALLOC:
        # No other segment has the size of those of the small pool.
        is_small = event.size_bytes == SMALL_SEGMENT_BYTES
        segments[event.address] = MappedRange(event.size_bytes, event.stream, is_small)
    elif action is Action.SEGMENT_UNMAP:
        _cut_out(segments, event.address, event.address + event.size_bytes)
    elif action is Action.SEGMENT_MAP:
        _put_in(segments, event)


def _cut_out(segments: dict[int, MappedRange], start: int, stop: int) -> None:
    """Take pages out of the stretches that they are part of."""
    for address, stretch in list(segments.items()):
        end = address + stretch.size_bytes
        if not stretch.is_expandable or end <= start or stop <= address:
            continue
        del segments[address]
        if address < start:
            segments[address] = stretch._replace(size_bytes=start - address)
        if stop < end:
            segments[stop] = stretch._replace(size_bytes=end - stop)


def _put_in(segments: dict[int, MappedRange], event: Event) -> None:
    """Put pages back, joined with the stretches that they touch."""
    start, stop = event.address, event.address + event.size_bytes
    # Pages of the small pool are a tenth of the large one's; neighbours know better.
    is_small = event.size_bytes % _LARGE_PAGE_BYTES != 0
    for address, stretch in list(segments.items()):
        if stretch.is_expandable and (address == stop or address + stretch.size_bytes == start):
            is_small = stretch.is_small
            start, stop = min(start, address), max(stop, address + stretch.size_bytes)
            del segments[address]
    segments[start] = MappedRange(stop - start, event.stream, is_small, True)


def _with_blocks(
    segments: Mapping[int, MappedRange],
    blocks: Mapping[int, _InUse],
    settings: AllocatorSettings,
    tails: Mapping[int, int],
) -> list[StartSegment]:
    """Sort blocks into their segments, and size them."""
    starts = sorted(segments)
    inside: dict[int, list[int]] = defaultdict(list)
    for address in sorted(blocks):
        index = bisect_right(starts, address) - 1
        if index >= 0 and address < starts[index] + segments[starts[index]].size_bytes:
            inside[starts[index]].append(address)
    return [
        StartSegment(
            address=start,
            size_bytes=segments[start].size_bytes,
            stream=segments[start].stream,
            is_small=segments[start].is_small,
            is_expandable=segments[start].is_expandable,
            blocks=tuple(_sized(start, segments[start], inside[start], blocks, settings, tails)),
        )
        for start in starts
    ]


def _sized(
    start: int,
    segment: MappedRange,
    addresses: Sequence[int],
    blocks: Mapping[int, _InUse],
    settings: AllocatorSettings,
    tails: Mapping[int, int],
) -> Iterator[StartBlock]:
    ends = [*addresses, start + segment.size_bytes][1:]
    for address, end in zip(addresses, ends, strict=True):
        block = blocks[address]
        least_bytes = round_request(block.requested_bytes, settings)
        tail_bytes, limit_bytes = 0, 0
        if block.size_bytes is None and not segment.is_small and not segment.is_expandable:
            gap_bytes = end - address - least_bytes
            tail_bytes = gap_bytes if gap_bytes <= MAX_TAIL_BYTES else tails.get(address, 0)
            limit_bytes = max(0, min(MAX_TAIL_BYTES, gap_bytes - MAX_TAIL_BYTES - MIN_BLOCK_BYTES))
        yield StartBlock(
            address=address,
            requested_bytes=block.requested_bytes,
            size_bytes=least_bytes + tail_bytes if block.size_bytes is None else block.size_bytes,
            is_waiting=block.is_waiting,
            frame=block.frame,
            tail_limit_bytes=limit_bytes,
        )
