"""The allocator's events of a run, and every private interface of torch that they take.

`memory_events`, `marked_memory_events` and `MemoryRecorder` rest on `profile.kineto_results`, `_profiler_enabled`
    Allocator events in order, see `measure/peak.py`, and what `set_mark` left among them; with its
    `experimental_event_tree` addresses of what collectives allocate, see Note [Released elsewhere].
`cuda_memory_events` rests on `torch.cuda.memory._record_memory_history`, `_snapshot`
    The same on CUDA.

Note [Released elsewhere]
    A collective on CPU copies its input on the calling thread. Whichever thread lets go of the copy last releases it,
    and the profiler does not see the thread of the backend. So an allocation inside a collective whose address is never
    released counts as released when the backend has done its work; any other, when its place is taken.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

_MARK = "memfit mark "
_COLLECTIVE, _ON_BACKEND = "c10d::", "gloo:"


def memory_events(run: Callable[[], Any]) -> list[int]:
    """Run once and return what every allocation (+) and release (-) on the CPU changed, in order."""
    return [change_bytes for label, change_bytes in marked_memory_events(run) if not label]


def marked_memory_events(run: Callable[[], Any]) -> list[tuple[str, int]]:
    """Allocations and releases, with "" before each, and the marks set between them, with 0 after each."""
    recorder = MemoryRecorder()
    recorder.start()
    try:
        run()
    finally:
        events = recorder.stop()
    return events


class MemoryRecorder:
    """Allocator events of the CPU between `start` and `stop`, as `marked_memory_events` returns them."""

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else every start and stop is printed
        self._profiler = torch.autograd.profiler.profile(profile_memory=True)

    @staticmethod
    def is_free() -> bool:
        """Whether no other profiler is running: there can be one only."""
        return not torch._C._autograd._profiler_enabled()

    def start(self) -> None:
        self._profiler.__enter__()

    def stop(self) -> list[tuple[str, int]]:
        self._profiler.__exit__(None, None, None)
        events = []
        communicates = False
        results: Any = self._profiler.kineto_results
        for event in results.events():
            name = event.name()
            if name == "[memory]" and event.device_type() == torch._C._autograd.DeviceType.CPU:
                events.append((event.start_ns(), "", event.nbytes()))
            elif name.startswith(_MARK):
                events.append((event.start_ns(), name.removeprefix(_MARK), 0))
            communicates = communicates or name.startswith(_COLLECTIVE)
        if communicates:
            events += _released_elsewhere(results.experimental_event_tree())
        return [(label, change_bytes) for _, label, change_bytes in sorted(events, key=lambda event: event[0])]


def set_mark(label: str) -> None:
    """Leave a mark among the allocator's events."""
    with torch.autograd.profiler.record_function(_MARK + label):
        pass


def _released_elsewhere(roots: Sequence[Any]) -> list[tuple[int, str, int]]:
    """The releases that were not seen, see Note [Released elsewhere]."""
    changes: list[tuple[int, int, int]] = []  # time, address, bytes
    collectives: list[tuple[int, int]] = []
    ends: list[tuple[int, int]] = []
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name.startswith(_COLLECTIVE):
            collectives.append((event.start_time_ns, event.end_time_ns))
        elif event.name.startswith(_ON_BACKEND):
            ends.append((event.start_time_ns, event.end_time_ns))
    releases = []
    following: dict[int, tuple[int, int]] = {}  # by address: time and bytes of its next change
    for time_ns, address, change_bytes in sorted(changes, reverse=True):
        next_ns, next_bytes = following.get(address, (0, 0))
        following[address] = time_ns, change_bytes
        if change_bytes < 0 or next_bytes < 0:
            continue
        inside = [span for span in collectives if span[0] <= time_ns <= span[1]]
        for start_ns, end_ns in inside:
            done_ns = min((each for each in ends if each[0] >= start_ns), default=(0, end_ns))[1]
            releases.append((max(end_ns, done_ns), "", -change_bytes))
        if not inside and next_bytes > 0:  # it was released, at the latest when its place was taken
            releases.append((next_ns - 1, "", -change_bytes))
    return releases


def cuda_memory_events(run: Callable[[], Any]) -> list[int]:
    """Run once and return what every allocation (+) and release (-) on the current CUDA device changed."""
    torch.cuda.memory._record_memory_history(context=None)
    try:
        run()
        torch.cuda.synchronize()
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    events = traces[torch.cuda.current_device()]
    return [signs[event["action"]] * event["size"] for event in events if event["action"] in signs]
