"""What `torch.cuda.memory._dump_snapshot` writes, as histories: one for every device that has something."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memfit.doctor.stacks import SEPARATOR, is_library
from memfit.errors import InvalidFile
from memfit.plan.allocator.history import Action, EndBlock, EndSegment, Event, MemoryHistory
from memfit.plan.allocator.settings import AllocatorSettings

_ACTIONS = {str(action): action for action in Action}
_MOST_CALLS = 40  # of a stack; what is further out says nothing about a block
_MOST_LETTERS = 200  # of a name
_INTERVALS = 16
_INSTALLED = re.compile(
    r".*/(?:site-packages|dist-packages)/"
    r"|.*/(?=torch/(?:nn|optim|autograd|utils|functional|_)\w*[/.])"  # a torch that was built from its sources
    r"|.*/(?=python3\.\d+/)"
)


def histories_of(data: Any, name: str) -> list[MemoryHistory]:
    """Read a snapshot: the dict of `_snapshot()`, or the list of segments of `memory_snapshot()`."""
    is_segments = isinstance(data, list) and all(isinstance(each, dict) for each in data)
    whole = {"segments": data, "device_traces": []} if is_segments else data
    if not isinstance(whole, dict) or not isinstance(whole.get("segments"), list):
        raise InvalidFile(
            "this is no memory snapshot: it has no list of segments; write one with "
            "torch.cuda.memory._record_memory_history() and _dump_snapshot(path)"
        )
    traces = whole.get("device_traces") or []
    settings = settings_of(whole.get("allocator_settings"))
    try:
        return list(_histories(whole["segments"], traces, settings, name))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InvalidFile(f"the snapshot is damaged: {type(error).__name__}: {error}; dump it again") from None


def settings_of(fields: Any) -> AllocatorSettings:
    """Read the settings that a snapshot carries; those of older ones are not known, and taken for the defaults."""
    if not isinstance(fields, Mapping):
        return AllocatorSettings()
    try:
        divisions = fields.get("roundup_power2_divisions") or {}
        by_size = [int(divisions[key]) for key in sorted(divisions, key=int)]
        max_split_bytes = int(fields.get("max_split_size", -1))
        return AllocatorSettings(
            expandable_segments=bool(fields.get("expandable_segments", False)),
            max_split_bytes=max_split_bytes if max_split_bytes > 0 else None,
            garbage_collection_threshold=float(fields.get("garbage_collection_threshold", 0.0)),
            roundup_power2_divisions=tuple((by_size + [0] * _INTERVALS)[:_INTERVALS]),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidFile(f"the snapshot's allocator settings cannot be read: {error}; dump it again") from None


def whole(number: Any) -> int:
    """Read a number of bytes or an address; raise ValueError for anything else."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{number!r} is no number of bytes and no address")
    return number


def _histories(
    segments: Sequence[Any], traces: Sequence[Any], settings: AllocatorSettings, name: str
) -> Iterator[MemoryHistory]:
    devices = {int(each.get("device", 0)) for each in segments}
    devices |= {index for index, trace in enumerate(traces) if trace}
    for device in sorted(devices):
        stacks = _Stacks()
        found = tuple(_segment(each, stacks) for each in segments if int(each.get("device", 0)) == device)
        trace = traces[device] if device < len(traces) else []
        rows = [(entry, _ACTIONS[entry["action"]]) for entry in trace if entry["action"] in _ACTIONS]
        times = [int(entry.get("time_us", 0)) for entry, _ in rows]
        yield MemoryHistory(
            name=name,
            device=device,
            settings=settings,
            events=tuple(_event(entry, action, stacks) for entry, action in rows),
            segments=tuple(sorted(found, key=lambda each: each.address)),
            frames=tuple(stacks.texts),
            times_us=tuple(each - times[0] for each in times) if any(times) else (),
        )


def _event(entry: Mapping[str, Any], action: Action, stacks: "_Stacks") -> Event:
    address = entry.get("addr", entry.get("device_free", 0))  # of "oom": what the device had left
    return Event(
        action, whole(address), whole(entry["size"]), int(entry.get("stream", 0)), stacks.index(entry.get("frames"))
    )


def _segment(fields: Mapping[str, Any], stacks: "_Stacks") -> EndSegment:
    pool = tuple(fields.get("segment_pool_id", (0, 0)))
    return EndSegment(
        address=whole(fields["address"]),
        size_bytes=whole(fields["total_size"]),
        stream=int(fields.get("stream", 0)),
        is_small=fields["segment_type"] == "small",
        blocks=tuple(_block(each, stacks) for each in fields["blocks"]),
        is_expandable=bool(fields.get("is_expandable", False)),
        is_private=pool not in ((0, 0), (0,), ()),
    )


def _block(fields: Mapping[str, Any], stacks: "_Stacks") -> EndBlock:
    size_bytes = whole(fields["size"])
    past = fields.get("history") or [{}]  # as torch 2.0 wrote it: the last request of a block first
    requested = fields.get("requested_size", past[0].get("real_size", size_bytes))
    frames = fields.get("frames") or past[0].get("frames")
    return EndBlock(size_bytes, str(fields["state"]), whole(requested), stacks.index(frames))


class _Stacks:
    """Distinct stacks, numbered as they come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._by_frames: dict[tuple[int, ...], int] = {}  # a snapshot shares its frames: most are told by identity

    def index(self, frames: Any) -> int:
        if not frames:
            return -1
        key = tuple(map(id, frames))
        if key not in self._by_frames:
            self._by_frames[key] = self._number(SEPARATOR.join(_call(each) for each in frames[:_MOST_CALLS]))
        return self._by_frames[key]

    def _number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


def _call(frame: Mapping[str, Any]) -> str:
    name = str(frame.get("name", ""))[:_MOST_LETTERS]
    path = str(frame.get("filename", "")).replace("\\", "/")
    if not path.endswith(".py"):
        return name or path[-_MOST_LETTERS:]
    return f"{_short_path(path)}:{int(frame.get('line', 0))}:{name}"


def _short_path(path: str) -> str:
    """Leave out where things are installed; of the user's own files the last two names say enough.

    A third one is left where two would look like a library's.

    >>> _short_path("/opt/env/lib/python3.11/site-packages/torch/nn/modules/linear.py")
    'torch/nn/modules/linear.py'
    >>> _short_path("/home/me/project/model/block.py"), _short_path("/home/me/project/modules/block.py")
    ('model/block.py', 'project/modules/block.py')
    """
    installed = _INSTALLED.search(path)
    if installed is not None:
        return path[installed.end() :][-_MOST_LETTERS:]
    names = path.split("/")
    count = 3 if is_library("/".join(names[-2:])) else 2
    return "/".join(names[-count:])[-_MOST_LETTERS:]
