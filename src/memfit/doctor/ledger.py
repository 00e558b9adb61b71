"""Who holds what, event by event: the recorded addresses with the sizes that blocks really had."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from memfit.plan.allocator.history import Action, Event, MemoryHistory
from memfit.plan.allocator.replay import Replay
from memfit.plan.allocator.sizes import round_request
from memfit.plan.allocator.start import MappedRange, move_segments

BEFORE_FIRST = -1  # position of what was there before the first event


class Held(NamedTuple):
    """A block that is in use."""

    size_bytes: int
    requested_bytes: int
    frame: int  # index into the history's frames; -1: not known
    position: int  # of the event that asked for it, or BEFORE_FIRST
    is_allocated: bool  # False: released, and still used by another stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """What one event does to the blocks in use: at most one comes, and at most one goes."""

    came: Held | None = None
    went: Held | None = None


class Ledger:
    """The blocks and segments of one moment; `advance` goes to the next."""

    def __init__(self, history: MemoryHistory, replay: Replay) -> None:
        self._history = history
        # Where the replay went another way its sizes are of other blocks: requests are then counted as rounded.
        self._sizes: Mapping[int, int] = replay.block_bytes if replay.is_equal else {}
        self.blocks: dict[int, Held] = {}
        self.segments: dict[int, MappedRange] = {}
        for segment in replay.start:
            self.segments[segment.address] = MappedRange(
                segment.size_bytes, segment.stream, segment.is_small, segment.is_expandable
            )
            for block in segment.blocks:
                self.blocks[block.address] = Held(
                    block.size_bytes, block.requested_bytes, block.frame, BEFORE_FIRST, not block.is_waiting
                )
        self.allocated_bytes = sum(each.size_bytes for each in self.blocks.values() if each.is_allocated)
        self.reserved_bytes = sum(each.size_bytes for each in self.segments.values())
        self.position = BEFORE_FIRST

    def changes(self, until: int | None = None) -> Iterator[Change]:
        """Go through the events, up to and with the one at `until`; the ledger is as it is after each."""
        last = len(self._history.events) - 1 if until is None else until
        while self.position < last:
            self.position += 1
            yield self._apply(self._history.events[self.position])

    def _apply(self, event: Event) -> Change:
        if event.action is Action.ALLOC:
            return self._allocate(event)
        if event.action is Action.FREE_REQUESTED:
            held = self.blocks.get(event.address)
            if held is None or not held.is_allocated:
                return Change()
            self.allocated_bytes -= held.size_bytes
            self.blocks[event.address] = held._replace(is_allocated=False)
            return Change(went=held)
        if event.action is Action.FREE_COMPLETED:
            self.blocks.pop(event.address, None)
            return Change()
        self._count_segment(event)
        return Change()

    def _allocate(self, event: Event) -> Change:
        size_bytes = self._sizes.get(self.position) or round_request(event.size_bytes, self._history.settings)
        held = Held(size_bytes, event.size_bytes, event.frame, self.position, True)
        went = self.blocks.get(event.address)  # a release that is not in the record
        if went is not None and went.is_allocated:
            self.allocated_bytes -= went.size_bytes
        self.blocks[event.address] = held
        self.allocated_bytes += size_bytes
        return Change(came=held, went=went if went is not None and went.is_allocated else None)

    def _count_segment(self, event: Event) -> None:
        if event.action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            self.reserved_bytes += event.size_bytes
        elif event.action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
            self.reserved_bytes -= event.size_bytes
        else:
            return
        move_segments(self.segments, event)
