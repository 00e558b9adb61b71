"""The caching allocator: requests in, addresses out, segments asked from the device only when no free block fits.

Note [What is counted]
    `allocated_bytes` are the blocks handed out, whole: a large block that was not split for a small remainder counts
    with it. `reserved_bytes` are the segments or mapped pages. A block that another stream still uses is no longer
    allocated, and not free either.
"""

import itertools

from memfit.plan.allocator import expandable, reclaim
from memfit.plan.allocator.blocks import Block, BlockPool
from memfit.plan.allocator.device import DeviceMemory
from memfit.plan.allocator.settings import AllocatorSettings
from memfit.plan.allocator.sizes import MAX_TAIL_BYTES, MIN_BLOCK_BYTES, is_small, round_request, segment_bytes


class OutOfDeviceMemory(Exception):
    """Report that neither a free block nor the device could serve a request, after all cached memory was given back."""

    def __init__(self, segment_bytes: int) -> None:
        super().__init__(f"a segment of {segment_bytes} bytes could not be had")
        self.segment_bytes = segment_bytes  # what torch calls "Tried to allocate"


class CachingAllocator:
    """The allocator of one device."""

    def __init__(self, settings: AllocatorSettings | None = None, device: DeviceMemory | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.device = device or DeviceMemory()
        self.small = BlockPool(is_small=True)
        self.large = BlockPool(is_small=False)
        self.segments: dict[int, int] = {}  # size by address; expandable ones have only their mapped bytes counted
        self.blocks: dict[int, Block] = {}  # handed out or waiting, by address
        self.allocated_bytes = self.reserved_bytes = self.requested_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0  # requests for which all cached memory was given back

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that may be reserved at most, if a fraction of the device was set."""
        if self.settings.memory_fraction is None or self.device.capacity_bytes is None:
            return None
        return int(self.settings.memory_fraction * self.device.capacity_bytes)

    @property
    def collects_garbage(self) -> bool:
        return self.settings.garbage_collection_threshold > 0 and self.limit_bytes is not None

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        """Serve a request and return its address."""
        rounded_bytes = round_request(size_bytes, self.settings)
        pool = self.small if is_small(rounded_bytes) else self.large
        block = self._free_block(pool, rounded_bytes, stream)
        if block is None:
            block = self._new_block(pool, rounded_bytes, stream)
        self._split(block, rounded_bytes)
        block.allocated = True
        block.requested_bytes = size_bytes
        self.blocks[block.address] = block
        self.requested_bytes += size_bytes
        self.allocated_bytes += block.size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block.address

    def record_stream(self, address: int, stream: int) -> None:
        """Note that another stream uses a block: it is not free before that stream has come so far."""
        block = self.blocks[address]
        if stream != block.stream:
            block.other_streams.add(stream)

    def free(self, address: int) -> None:
        """Release a block: at once, or when the other streams that use it are done."""
        block = self.blocks[address]
        self.request_free(address)
        if not block.other_streams:
            self.complete_free(address)

    def request_free(self, address: int) -> None:
        """Let the owner go: the block is no longer allocated, and not yet to be had."""
        block = self.blocks[address]
        block.allocated = False
        block.waiting = True
        self.allocated_bytes -= block.size_bytes
        self.requested_bytes -= block.requested_bytes

    def complete_free(self, address: int) -> None:
        """Put a block back into its pool, merged with its idle neighbours."""
        block = self.blocks.pop(address)
        block.waiting = False
        block.other_streams.clear()
        block.absorb(block.previous)
        block.absorb(block.next)
        block.pool.add(block)

    def finish_streams(self) -> None:
        """Complete every release that waits for other streams."""
        for address in [address for address, block in self.blocks.items() if block.waiting]:
            self.complete_free(address)

    def empty_cache(self) -> list[tuple[int, int]]:
        """Give every segment back that is wholly free; return their addresses and sizes in that order."""
        self.finish_streams()
        return reclaim.release_cached(self)

    def reserve(self, size_bytes: int) -> None:
        """Count segments or pages that came or, below zero, went."""
        self.reserved_bytes += size_bytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    def _free_block(self, pool: BlockPool, size_bytes: int, stream: int) -> Block | None:
        """Take the best fit out of the pool: the smallest block that is big enough, then the lowest address."""
        if self.collects_garbage:
            pool.searches += 1
        candidates = pool.at_least(size_bytes, stream)
        block = next(candidates, None)
        if block is None:
            return None
        if block.in_expandable:
            block = expandable.best_fit(block, candidates)
        if not self._may_serve(block, size_bytes):
            return None
        pool.remove(block)
        return block

    def _may_serve(self, block: Block, size_bytes: int) -> bool:
        """Keep blocks that are never split for requests of about their size."""
        limit_bytes = self.settings.max_split_bytes
        if limit_bytes is None:
            return True
        if size_bytes < limit_bytes:
            return block.size_bytes < limit_bytes
        return block.size_bytes < size_bytes + self.settings.max_non_split_rounding_bytes

    def _new_block(self, pool: BlockPool, size_bytes: int, stream: int) -> Block:
        """Ask the device; where it refuses, give cached memory back and ask again."""
        if self.collects_garbage:
            reclaim.collect_garbage(self)
        block = self._segment(pool, size_bytes, stream)
        if block is None and reclaim.release_oversize(self, pool, size_bytes, stream):
            block = self._segment(pool, size_bytes, stream)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._segment(pool, size_bytes, stream)
        if block is None:
            raise OutOfDeviceMemory(segment_bytes(size_bytes, self.settings))
        return block

    def _segment(self, pool: BlockPool, size_bytes: int, stream: int) -> Block | None:
        wanted_bytes = segment_bytes(size_bytes, self.settings)
        if self.limit_bytes is not None and self.reserved_bytes + wanted_bytes > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return expandable.grow(self, pool, size_bytes, stream)
        address = self.device.allocate(wanted_bytes)
        if address is None:
            return None
        self.segments[address] = wanted_bytes
        self.reserve(wanted_bytes)
        return Block(pool, stream, address, wanted_bytes)

    def _split(self, block: Block, size_bytes: int) -> None:
        """Hand out the low part and keep the rest free, where the rest is worth it."""
        remaining_bytes = block.size_bytes - size_bytes
        if not self._is_split_for(block, size_bytes, remaining_bytes):
            return
        rest = Block(block.pool, block.stream, block.address + size_bytes, remaining_bytes)
        rest.range_start = block.range_start
        block.size_bytes = size_bytes
        block.insert_after(rest)
        block.pool.add(rest)

    def _is_split_for(self, block: Block, size_bytes: int, remaining_bytes: int) -> bool:
        if block.pool.is_small or self.settings.expandable_segments:
            return remaining_bytes >= MIN_BLOCK_BYTES
        limit_bytes = self.settings.max_split_bytes
        return (limit_bytes is None or size_bytes < limit_bytes) and remaining_bytes > MAX_TAIL_BYTES

    def idle_bytes(self) -> int:
        """Sum what is reserved and neither handed out nor waiting."""
        free = itertools.chain(self.small.free_blocks(), self.large.free_blocks())
        return sum(block.size_bytes for block in free)
