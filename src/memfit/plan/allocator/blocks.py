"""Blocks of device memory, and the pools that hold the free ones."""

from bisect import bisect_left, insort
from collections.abc import Iterator


class Block:
    """A contiguous range of one segment: handed out, waiting for other streams, free, or without pages yet."""

    __slots__ = (
        *("address", "allocated", "free_since", "mapped", "next", "other_streams", "pool"),
        *("previous", "range_start", "requested_bytes", "size_bytes", "stream", "waiting"),
    )

    def __init__(self, pool: "BlockPool", stream: int, address: int, size_bytes: int) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size_bytes = size_bytes
        self.requested_bytes = 0
        self.allocated = False
        self.waiting = False  # freed by its owner, still in use on another stream
        self.other_streams: set[int] = set()  # that recorded a use
        self.mapped = True
        self.range_start: int | None = None  # of the expandable segment that it is part of
        self.free_since = 0  # how often the pool had been searched when it became free
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None

    @property
    def in_expandable(self) -> bool:
        return self.range_start is not None

    @property
    def is_idle(self) -> bool:
        return not self.allocated and not self.waiting

    def insert_after(self, block: "Block") -> None:
        """Link a new block behind this one."""
        block.previous, block.next = self, self.next
        if self.next is not None:
            self.next.previous = block
        self.next = block

    def insert_before(self, block: "Block") -> None:
        """Link a new block in front of this one."""
        block.previous, block.next = self.previous, self
        if self.previous is not None:
            self.previous.next = block
        self.previous = block

    def absorb(self, neighbour: "Block | None") -> bool:
        """Take an idle neighbour in, out of its pool too; say whether there was one to take."""
        if neighbour is None or not neighbour.is_idle or neighbour.mapped != self.mapped:
            return False
        neighbour.pool.remove(neighbour)
        if neighbour is self.previous:
            self.address = neighbour.address
            self.previous = neighbour.previous
            if self.previous is not None:
                self.previous.next = self
        else:
            self.next = neighbour.next
            if self.next is not None:
                self.next.previous = self
        self.size_bytes += neighbour.size_bytes
        return True


class BlockPool:
    """The free blocks of one kind: those of small or of large requests, each stream for itself."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.searches = 0  # counted for garbage collection alone
        self._free: dict[int, list[tuple[int, int, Block]]] = {}  # by stream: size, address
        self._unmapped: dict[int, list[tuple[int, Block]]] = {}  # by stream: address

    def add(self, block: Block) -> None:
        if block.mapped:
            block.free_since = self.searches
            insort(self._free.setdefault(block.stream, []), (block.size_bytes, block.address, block))
        else:
            insort(self._unmapped.setdefault(block.stream, []), (block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            free = self._free[block.stream]
            del free[bisect_left(free, (block.size_bytes, block.address))]
        else:
            unmapped = self._unmapped[block.stream]
            del unmapped[bisect_left(unmapped, (block.address,))]

    def at_least(self, size_bytes: int, stream: int) -> Iterator[Block]:
        """Yield the free blocks of a stream from this size on, smallest first, then by address."""
        free = self._free.get(stream, ())
        for index in range(bisect_left(free, (size_bytes,)), len(free)):
            yield free[index][2]

    def unmapped(self, stream: int) -> Iterator[Block]:
        """Yield the ranges of a stream that have no pages, by address."""
        return (block for _, block in self._unmapped.get(stream, ()))

    def free_blocks(self, stream: int | None = None) -> list[Block]:
        """List the free blocks by stream, size and address."""
        streams = sorted(self._free) if stream is None else [stream]
        return [block for each in streams for _, _, block in self._free.get(each, ())]
