"""What the allocator gives back to the device, and when: garbage collection, retries, `empty_cache`."""

from typing import TYPE_CHECKING

from memfit.plan.allocator import expandable
from memfit.plan.allocator.blocks import Block, BlockPool

if TYPE_CHECKING:
    from memfit.plan.allocator.caching import CachingAllocator


def release_cached(allocator: "CachingAllocator") -> list[tuple[int, int]]:
    """Give back every segment that is wholly free, large ones first; return their addresses and sizes."""
    released = []
    for pool in (allocator.large, allocator.small):
        for block in pool.free_blocks():
            if block.in_expandable:
                expandable.unmap(allocator, block)
            elif not block.is_split:
                released.append((block.address, block.size_bytes))
                release_segment(allocator, block)
    return released


def release_oversize(allocator: "CachingAllocator", pool: BlockPool, size_bytes: int, stream: int) -> bool:
    """Give back blocks that are never split: one that is big enough, else the largest until they are enough together.

    Only with a limit of splitting; says whether enough came free to ask the device again.
    """
    limit_bytes = allocator.settings.max_split_bytes
    if limit_bytes is None:
        return False
    wanted_bytes = max(limit_bytes, size_bytes)
    fitting = next(pool.at_least(wanted_bytes, stream), None)
    if fitting is not None:
        release_segment(allocator, fitting)
        return True
    released_bytes = 0
    for block in reversed(pool.free_blocks(stream)):
        if released_bytes >= wanted_bytes or block.size_bytes < limit_bytes:
            break
        if not block.in_expandable:
            released_bytes += block.size_bytes
            release_segment(allocator, block)
    return released_bytes >= wanted_bytes


def collect_garbage(allocator: "CachingAllocator") -> None:
    """Give back large segments that were not used for long, while more than the threshold is reserved."""
    limit_bytes = allocator.limit_bytes
    assert limit_bytes is not None
    threshold_bytes = int(allocator.settings.garbage_collection_threshold * limit_bytes)
    target_bytes = allocator.reserved_bytes - threshold_bytes
    pool = allocator.large
    waiting = [each for each in pool.free_blocks() if not each.is_split]
    reclaimed_bytes = 0
    while waiting and reclaimed_bytes < target_bytes:
        mean_age = sum(pool.searches - each.free_since for each in waiting) / len(waiting)
        old = [each for each in waiting if not each.in_expandable and pool.searches - each.free_since >= mean_age]
        if not old:
            return
        for block in old:
            reclaimed_bytes += block.size_bytes
            release_segment(allocator, block)
        waiting = [each for each in waiting if each not in old]


def release_segment(allocator: "CachingAllocator", block: Block) -> None:
    """Give the segment back that a free block fills."""
    block.pool.remove(block)
    del allocator.segments[block.address]
    allocator.device.release(block.address, block.size_bytes)
    allocator.reserve(-block.size_bytes)
