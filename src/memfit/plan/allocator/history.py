"""A recorded history of an allocator, as plain data: what was asked for, what was released, and how it ended."""

import dataclasses
from enum import StrEnum
from typing import NamedTuple

from memfit.plan.allocator.settings import AllocatorSettings


class Action(StrEnum):
    """What the allocator did, by torch's own names."""

    ALLOC = "alloc"
    FREE_REQUESTED = "free_requested"  # the owner let it go
    FREE_COMPLETED = "free_completed"  # no stream uses it any more
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"  # pages of an expandable segment
    SEGMENT_UNMAP = "segment_unmap"
    OUT_OF_MEMORY = "oom"


class Event(NamedTuple):
    """One thing that the allocator did."""

    action: Action
    address: int
    size_bytes: int  # as requested; of segments and pages, their own
    stream: int
    frame: int  # index into MemoryHistory.frames; -1: not recorded


class EndBlock(NamedTuple):
    """One block of a segment when the recording ended."""

    size_bytes: int
    state: str  # "active_allocated", "active_pending_free" or "inactive"
    requested_bytes: int
    frame: int = -1

    @property
    def is_allocated(self) -> bool:
        return self.state == "active_allocated"

    @property
    def is_active(self) -> bool:
        return self.state != "inactive"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndSegment:
    """One segment when the recording ended; of an expandable one, a stretch of mapped pages."""

    address: int
    size_bytes: int
    stream: int
    is_small: bool
    blocks: tuple[EndBlock, ...]
    is_expandable: bool = False
    is_private: bool = False  # of a CUDA graph or a memory pool of the user's own


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryHistory:
    """Everything that was recorded of one device."""

    name: str
    device: int
    settings: AllocatorSettings
    frames: tuple[str, ...]  # who asked: "operator < file.py:12:forward < train.py:40:step", innermost first
    events: tuple[Event, ...]
    segments: tuple[EndSegment, ...]  # when the recording ended
    times_us: tuple[int, ...] = ()  # of the events, from the first on; empty: not recorded
    notes: tuple[str, ...] = ()  # what a reader should know about this recording

    @property
    def reserved_at_end_bytes(self) -> int:
        return sum(each.size_bytes for each in self.segments)

    @property
    def allocated_at_end_bytes(self) -> int:
        return sum(block.size_bytes for each in self.segments for block in each.blocks if block.is_allocated)
