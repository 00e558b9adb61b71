"""Histories that the simulation itself records, as torch would: for settings that no real record was found of."""

import dataclasses

from memfit.plan.allocator.caching import CachingAllocator
from memfit.plan.allocator.device import DeviceMemory
from memfit.plan.allocator.history import Action, EndBlock, EndSegment, Event, MemoryHistory
from memfit.plan.allocator.settings import AllocatorSettings


class RecordingDevice(DeviceMemory):
    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.events: list[Event] = []

    def allocate(self, size_bytes):
        address = super().allocate(size_bytes)
        if address is not None:
            self.events.append(Event(Action.SEGMENT_ALLOC, address, size_bytes, 0, 0))
        return address

    def release(self, address, size_bytes):
        super().release(address, size_bytes)
        self.events.append(Event(Action.SEGMENT_FREE, address, size_bytes, 0, 0))

    def map_pages(self, address, size_bytes):
        mapped = super().map_pages(address, size_bytes)
        if mapped:
            self.events.append(Event(Action.SEGMENT_MAP, address, size_bytes, 0, 0))
        return mapped

    def unmap_pages(self, address, size_bytes):
        super().unmap_pages(address, size_bytes)
        self.events.append(Event(Action.SEGMENT_UNMAP, address, size_bytes, 0, 0))


class Recorder:
    """An allocator whose events are kept."""

    def __init__(self, settings: str = "", capacity_bytes: int | None = None) -> None:
        self.device = RecordingDevice(capacity_bytes)
        self.allocator = CachingAllocator(AllocatorSettings.parse(settings), self.device)

    def allocate(self, size_bytes: int, frame: int = 0) -> int:
        address = self.allocator.allocate(size_bytes)
        self.device.events.append(Event(Action.ALLOC, address, size_bytes, 0, frame))
        return address

    def free(self, address: int) -> None:
        size_bytes = self.allocator.blocks[address].requested_bytes
        self.allocator.free(address)
        for action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            self.device.events.append(Event(action, address, size_bytes, 0, 0))

    def history(self, *, skip: int = 0, frames: tuple[str, ...] = ("aten::empty < train.py:1:main",)) -> MemoryHistory:
        """Everything but the first events, as a recording that began late has it."""
        return MemoryHistory(
            name="recorded",
            device=0,
            settings=self.allocator.settings,
            frames=frames,
            events=tuple(self.device.events[skip:]),
            segments=tuple(self._segments()),
        )

    def _segments(self):
        for block in self._firsts():
            start, blocks, is_small = block, [], block.pool.is_small
            while block is not None and block.mapped:
                state = "active_allocated" if block.allocated else "inactive"
                blocks.append(EndBlock(block.size_bytes, state, block.requested_bytes))
                block = block.next
            yield EndSegment(
                address=start.address,
                size_bytes=sum(each.size_bytes for each in blocks),
                stream=start.stream,
                is_small=is_small,
                blocks=tuple(blocks),
                is_expandable=start.in_expandable,
            )

    def _firsts(self):
        """The first block of every segment, or of every stretch of mapped pages."""
        pools = (self.allocator.small, self.allocator.large)
        blocks = [*self.allocator.blocks.values(), *(each for pool in pools for each in pool.free_blocks())]
        firsts = [each for each in blocks if each.previous is None or not each.previous.mapped]
        return sorted(firsts, key=lambda block: block.address)


def shifted(history: MemoryHistory, position: int, bytes_off: int) -> MemoryHistory:
    """The same history with one address changed, which no allocator would have given."""
    events = list(history.events)
    events[position] = events[position]._replace(address=events[position].address + bytes_off)
    return dataclasses.replace(history, events=tuple(events))


def as_snapshot(*histories: MemoryHistory) -> dict:
    """Histories as `torch.cuda.memory._snapshot` returns them, one for each device."""
    traces = [[] for _ in range(max(each.device for each in histories) + 1)]
    for history in histories:
        traces[history.device] = [_entry(history, event) for event in history.events]
    settings = histories[0].settings
    return {
        "segments": [_segment(history, each) for history in histories for each in history.segments],
        "device_traces": traces,
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": str(settings),
            "max_split_size": -1 if settings.max_split_bytes is None else settings.max_split_bytes,
            "garbage_collection_threshold": settings.garbage_collection_threshold,
            "expandable_segments": settings.expandable_segments,
            "roundup_power2_divisions": {
                str(2**index): count for index, count in enumerate(settings.roundup_power2_divisions)
            },
        },
    }


def _entry(history: MemoryHistory, event: Event) -> dict:
    place = "device_free" if event.action is Action.OUT_OF_MEMORY else "addr"
    frames = _frames(history.frames[event.frame])
    return {"action": str(event.action), place: event.address, "size": event.size_bytes, "stream": 0, "frames": frames}


def _frames(stack: str) -> list[dict]:
    frames = []
    for call in stack.split(" < "):
        path, _, rest = call.partition(".py:")
        line, _, name = rest.partition(":")
        if rest:
            folder = "/opt/lib/python3.11/site-packages" if path.startswith("torch/") else "/home/me"
            frames.append({"filename": f"{folder}/{path}.py", "line": int(line), "name": name})
        else:
            frames.append({"filename": "??", "line": 0, "name": call})
    return frames


def _segment(history: MemoryHistory, segment: EndSegment) -> dict:
    return {
        "device": history.device,
        "address": segment.address,
        "total_size": segment.size_bytes,
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.is_expandable,
        "blocks": [
            {"size": each.size_bytes, "requested_size": each.requested_bytes, "state": each.state, "frames": []}
            for each in segment.blocks
        ],
    }
