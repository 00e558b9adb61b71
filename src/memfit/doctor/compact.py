"""A history as columns, in JSON: a tenth of a snapshot's size, and nothing but text and numbers.

{"name": ..., "device": 0, "settings": {...}, "columns": ["action", "address", "size", "stream", "frame"],
 "frames": ["operator < file.py:12:forward", ...], "events": [["alloc", 139695119925248, 2000000, 0, 0], ...],
 "segments_at_end": [{"address": ..., "total_size": ..., "kind": "large", "stream": 0,
                      "blocks": [[size, "active_allocated", requested], ...]}, ...]}
"""

from collections.abc import Mapping
from typing import Any

from memfit.doctor.snapshot import settings_of, whole
from memfit.errors import InvalidFile
from memfit.plan.allocator.history import Action, EndBlock, EndSegment, Event, MemoryHistory

_COLUMNS = ["action", "address", "size", "stream", "frame"]
_ACTIONS = {str(action): action for action in Action}


def is_compact(data: Any) -> bool:
    """Tell whether data looks like a history as columns."""
    return isinstance(data, dict) and "events" in data and "segments_at_end" in data


def compact_history(data: Mapping[str, Any], name: str) -> MemoryHistory:
    """Read a history as columns."""
    if data.get("columns", _COLUMNS) != _COLUMNS:
        raise InvalidFile(f"the history's columns are {data['columns']!r}, this memfit reads {_COLUMNS!r}")
    try:
        return MemoryHistory(
            name=str(data.get("name", name)),
            device=int(data.get("device", 0)),
            settings=settings_of(data.get("settings")),
            frames=tuple(str(each) for each in data["frames"]),
            events=tuple(_event(row, len(data["frames"])) for row in data["events"] if row[0] in _ACTIONS),
            segments=tuple(_segment(each) for each in data["segments_at_end"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InvalidFile(f"the history is damaged: {type(error).__name__}: {error}; write it again") from None


def _event(row: Any, frame_count: int) -> Event:
    action, address, size_bytes, stream, frame = row
    if not -1 <= frame < frame_count:
        raise ValueError(f"frame {frame!r} of {frame_count}")
    return Event(_ACTIONS[action], whole(address), whole(size_bytes), int(stream), int(frame))


def _segment(fields: Mapping[str, Any]) -> EndSegment:
    return EndSegment(
        address=whole(fields["address"]),
        size_bytes=whole(fields["total_size"]),
        stream=int(fields.get("stream", 0)),
        is_small=fields["kind"] == "small",
        blocks=tuple(EndBlock(whole(size), str(state), whole(asked)) for size, state, asked in fields["blocks"]),
        is_expandable=bool(fields.get("is_expandable", False)),
    )
