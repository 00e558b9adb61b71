"""Expandable segments: one range of addresses for a pool and stream, with pages mapped where they are needed.

A block without pages stands for the addresses that may still be mapped. Pages are whole: a request that needs a byte
of one maps all of it, and only pages that are wholly free are given back.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memfit.plan.allocator.blocks import Block, BlockPool
from memfit.plan.allocator.sizes import SMALL_SEGMENT_BYTES

if TYPE_CHECKING:
    from memfit.plan.allocator.caching import CachingAllocator

_ADDRESSES_PER_BYTE = 9, 8  # of the device's memory, so that pages can move to the end of a range
_ADDRESSES_WITHOUT_LIMIT = 2**46


def best_fit(block: Block, larger: Iterator[Block]) -> Block:
    """Compare blocks by what they can grow to, so that one at the edge of its pages is not taken lightly."""
    for candidate in larger:
        if not block.is_split or _reach_bytes(candidate) >= _reach_bytes(block):
            break
        block = candidate
    return block


def grow(allocator: "CachingAllocator", pool: BlockPool, size_bytes: int, stream: int) -> Block | None:
    """Map the pages that are missing for a block of this size; None where the device has no more."""
    block = _candidate(allocator, pool, size_bytes, stream)
    if not block.mapped and not _map(allocator, block, min(block.size_bytes, size_bytes)):
        return None
    while block.size_bytes < size_bytes:
        following = block.next
        assert following is not None  # the candidate has room for the request
        if not _map(allocator, following, min(size_bytes - block.size_bytes, following.size_bytes)):
            return None
        block = following
    pool.remove(block)
    return block


def unmap(allocator: "CachingAllocator", block: Block) -> None:
    """Give the whole pages of a free block back; what is left of it on both sides stays free."""
    assert block.range_start is not None
    page_bytes = page_bytes_of(allocator, block.pool)
    offset = block.address - block.range_start
    start = block.range_start + -(-offset // page_bytes) * page_bytes
    stop = block.range_start + (offset + block.size_bytes) // page_bytes * page_bytes
    if start >= stop:
        return
    block.pool.remove(block)
    _cut_off(block, start, stop)
    block.mapped = False
    allocator.device.unmap_pages(start, stop - start)
    allocator.reserve(start - stop)
    block.absorb(block.previous)
    block.absorb(block.next)
    block.pool.add(block)


def page_bytes_of(allocator: "CachingAllocator", pool: BlockPool) -> int:
    """Size the pages of a pool's expandable segments."""
    return SMALL_SEGMENT_BYTES if pool.is_small else allocator.settings.large_segment_bytes


def new_range(pool: BlockPool, stream: int, address: int, size_bytes: int) -> Block:
    """Make the block of a range of addresses that has no pages yet."""
    block = Block(pool, stream, address, size_bytes)
    block.mapped = False
    block.range_start = address
    pool.add(block)
    return block


def _reach_bytes(block: Block) -> int:
    following = block.next
    return block.size_bytes + (following.size_bytes if following is not None and not following.mapped else 0)


def _candidate(allocator: "CachingAllocator", pool: BlockPool, size_bytes: int, stream: int) -> Block:
    """Find the lowest addresses with room, from a free block right before them on; else a new range."""
    for unmapped in pool.unmapped(stream):
        before = unmapped.previous
        block = before if before is not None and before.is_idle else unmapped
        if _has_room(block, size_bytes):
            return block
    page_bytes = page_bytes_of(allocator, pool)
    capacity_bytes = allocator.device.capacity_bytes
    wanted_bytes = _ADDRESSES_WITHOUT_LIMIT
    if capacity_bytes is not None:
        wanted_bytes = capacity_bytes * _ADDRESSES_PER_BYTE[0] // _ADDRESSES_PER_BYTE[1]
    range_bytes = -(-max(wanted_bytes, size_bytes) // page_bytes) * page_bytes
    return new_range(pool, stream, allocator.device.reserve_addresses(range_bytes), range_bytes)


def _has_room(block: Block | None, size_bytes: int) -> bool:
    found_bytes = 0
    while block is not None and block.is_idle and found_bytes < size_bytes:
        found_bytes += block.size_bytes
        block = block.next
    return found_bytes >= size_bytes


def _map(allocator: "CachingAllocator", block: Block, size_bytes: int) -> bool:
    """Map the pages under the first bytes of an unmapped block, and join it with its free neighbours."""
    page_bytes = page_bytes_of(allocator, block.pool)
    mapped_bytes = min(-(-size_bytes // page_bytes) * page_bytes, block.size_bytes)
    if not allocator.device.map_pages(block.address, mapped_bytes):
        return False
    block.pool.remove(block)
    if mapped_bytes < block.size_bytes:
        rest = Block(block.pool, block.stream, block.address + mapped_bytes, block.size_bytes - mapped_bytes)
        rest.mapped, rest.range_start = False, block.range_start
        block.insert_after(rest)
        block.pool.add(rest)
    block.size_bytes = mapped_bytes
    block.mapped = True
    block.absorb(block.previous)
    block.absorb(block.next)
    block.pool.add(block)
    allocator.reserve(mapped_bytes)
    return True


def _cut_off(block: Block, start: int, stop: int) -> None:
    """Leave of a block what lies between two addresses; both ends become free blocks of their own."""
    end = block.address + block.size_bytes
    if block.address < start:
        before = Block(block.pool, block.stream, block.address, start - block.address)
        before.range_start = block.range_start
        block.insert_before(before)
        block.pool.add(before)
    if stop < end:
        after = Block(block.pool, block.stream, stop, end - stop)
        after.range_start = block.range_start
        block.insert_after(after)
        block.pool.add(after)
    block.address, block.size_bytes = start, stop - start
