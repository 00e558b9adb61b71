"""Put segments and blocks that were there already into an allocator."""

from collections.abc import Sequence

from memfit.plan.allocator import expandable
from memfit.plan.allocator.blocks import Block, BlockPool
from memfit.plan.allocator.caching import CachingAllocator
from memfit.plan.allocator.start import StartBlock, StartSegment

_ADDRESSES_AFTER = 2**46  # of an expandable segment, behind its last pages


def adopt(allocator: CachingAllocator, segments: Sequence[StartSegment]) -> None:
    """Take over the state that a recording began with."""
    ranges: dict[tuple[bool, int], list[StartSegment]] = {}
    for segment in segments:
        if segment.is_expandable:
            ranges.setdefault((segment.is_small, segment.stream), []).append(segment)
            continue
        allocator.segments[segment.address] = segment.size_bytes
        _adopt_stretch(allocator, segment, None, None)
    for stretches in ranges.values():
        _adopt_range(allocator, sorted(stretches, key=lambda each: each.address))


def _adopt_range(allocator: CachingAllocator, stretches: Sequence[StartSegment]) -> None:
    """Chain the mapped stretches of one expandable segment with the addresses between them and after."""
    last: Block | None = None
    start = stretches[0].address
    for index, stretch in enumerate(stretches):
        last = _adopt_stretch(allocator, stretch, last, start)
        end = stretch.address + stretch.size_bytes
        stop = stretches[index + 1].address if index + 1 < len(stretches) else end + _ADDRESSES_AFTER
        unmapped = expandable.new_range(last.pool, stretch.stream, end, stop - end)
        unmapped.range_start = start
        last = _append(last, unmapped)


def _adopt_stretch(
    allocator: CachingAllocator, segment: StartSegment, last: Block | None, range_start: int | None
) -> Block:
    """Fill a segment with its blocks and free ones between them; return the last."""
    pool = allocator.small if segment.is_small else allocator.large
    allocator.reserve(segment.size_bytes)
    end = segment.address + segment.size_bytes
    position = segment.address
    for block in (*segment.blocks, None):
        stop = end if block is None else block.address
        if position < stop:
            free = Block(pool, segment.stream, position, stop - position)
            free.range_start = range_start
            last = _append(last, free)
            pool.add(free)
        if block is not None:
            last = _append(last, _in_use(allocator, pool, segment.stream, block))
            last.range_start = range_start
            position = block.address + block.size_bytes
    assert last is not None  # no segment is empty
    return last


def _in_use(allocator: CachingAllocator, pool: BlockPool, stream: int, block: StartBlock) -> Block:
    taken = Block(pool, stream, block.address, block.size_bytes)
    taken.requested_bytes = block.requested_bytes
    taken.allocated, taken.waiting = not block.is_waiting, block.is_waiting
    allocator.blocks[block.address] = taken
    if taken.allocated:
        allocator.allocated_bytes += taken.size_bytes
        allocator.requested_bytes += taken.requested_bytes
    return taken


def _append(last: Block | None, block: Block) -> Block:
    if last is not None:
        last.insert_after(block)
    return block
