"""The allocator's events of a run, and every private interface of torch that they take.

`memory_events`, `marked_memory_events` and `MemoryRecorder` rest on `_prepare_profiler`, `_enable_profiler`,
    `_disable_profiler`, `_profiler_enabled`, `RecordScope`, `profile.config` and `profiler._is_profiler_enabled`
    Allocator events in order, see `measure/peak.py`, and what `set_mark` left among them; its
    `experimental_event_tree` has the address of every block. The last one says whether a profiler runs on any thread.
`set_mark` and `PriorStorages` rest on `_RecordFunctionFast`
    Marks the release of storages that were allocated before, see Note [Allocated before].
`_without_unknown_blocks` rests on the variable `FLAGS_caffe2_log_level` of libc10
    The level that torch's C++ code logs from, which `TORCH_CPP_LOG_LEVEL` sets at the start of a process.

Note [Allocated before]
    The profiler knows the size of a block only if it saw the allocation. It reports no release of a block that was
    allocated before it ever ran, and it reports one of a block that an earlier recording saw, maybe with the size
    of what lay at that address then. So a release counts if its address was allocated in the same recording. Torch
    keeps the Python object of a storage as long as the storage itself, and the finalizer of that object marks the
    release of a storage that a caller names. A storage that is resized while it is recorded counts with its
    first size until it is gone, and what it grows to counts beside it.

Note [Totals of a device]
    The backward pass of an accelerator runs on threads of its own, which drop some values where the profiler does not
    look. But with every event it hears how much the device has handed out, so that counts, and a release that was not
    seen counts from the next event on. Releases of what was there before and nobody named are taken out.

Note [Segments]
    There is one profiler, and what it saw is known when it stops. So where a recorder starts or stops inside another,
    the profiler stops and starts again, and all recorders that are active get what it saw until then. The marks of one
    recorder are seen by those around it.

Note [Not while tracing]
    The profiler crashes now and then if it runs while AOTAutograd traces a step with a Transformer. A trace allocates
    nothing but small constants, so recordings pause meanwhile.

Note [Released elsewhere]
    A collective on CPU copies its input on the calling thread. Whichever thread lets go of the copy last releases it,
    and the profiler does not see the thread of the backend. So an allocation inside a collective whose address is never
    released counts as released when the collective returns to its caller, who waits for it; any other, when its place
    is taken.

Note [Threads of a backend]
    The work of a collective is a user's annotation to the profiler, whose end a thread of gloo's writes into the memory
    of the profiler, after it has told whoever waits that the work is done. A profiler that was stopped in between is
    gone, and the process crashes. So recordings look at operators alone, and annotations are none of them: gloo asks
    whether anybody looks, and leaves it.
"""

import contextlib
import ctypes
import dataclasses
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from memfit.accelerator import allocated_bytes
from memfit.errors import ExecutionError

_MARK = "memfit mark "
_RELEASE = "memfit release "
_CHANGE = "change "
_COLLECTIVE = "c10d::"
_OPERATORS = torch._C._profiler.RecordScope.FUNCTION
_ERROR_LEVEL = 2  # of torch's C++ log: 0 is information, 1 a warning


class PriorStorages:
    """Marks the releases of storages that were allocated before a recording, see Note [Allocated before]."""

    def __init__(self, storages: Iterable[torch.UntypedStorage] = ()) -> None:
        distinct = list({storage._cdata: storage for storage in storages}.values())
        self._sizes_bytes = [storage.nbytes() for storage in distinct]
        self.addresses = frozenset(storage.data_ptr() for storage in distinct)
        self._released_ns: dict[int, int] = {}
        self._finalizers = [weakref.finalize(storage, self._release, number) for number, storage in enumerate(distinct)]
        for finalizer in self._finalizers:
            finalizer.atexit = False

    def stop(self) -> None:
        """Follow the storages no longer."""
        for finalizer in self._finalizers:
            finalizer.detach()

    def releases(self, marked_ns: dict[int, int]) -> list[tuple[int, str, int]]:
        """Return the releases as events; a thread that the profiler does not see leaves no mark but the time."""
        return [
            (marked_ns.get(number, time_ns), "", -self._sizes_bytes[number])
            for number, time_ns in self._released_ns.items()
        ]

    def _release(self, number: int) -> None:
        self._released_ns[number] = time.time_ns()
        with torch._C._profiler._RecordFunctionFast(f"{_RELEASE}{number}"):
            pass


def memory_events(
    run: Callable[[], Any], before: PriorStorages | None = None, device: torch.device | None = None
) -> list[int]:
    """Run once and return what every allocation (+) and release (-) changed, on the CPU or on a device, in order.

    Releases of what was allocated before the run are those of the storages in `before`.
    """
    return [change_bytes for label, change_bytes in marked_memory_events(run, before, device) if not label]


def marked_memory_events(
    run: Callable[[], Any], before: PriorStorages | None = None, device: torch.device | None = None
) -> list[tuple[str, int]]:
    """Allocations and releases, with "" before each, and the marks set between them, with 0 after each."""
    recorder = MemoryRecorder(before, device)
    recorder.start()
    try:
        run()
    finally:
        events = recorder.stop()
    return events


class MemoryRecorder:
    """Allocator events of the CPU or a device between `start` and `stop`, as `marked_memory_events` returns them.

    Recorders may be nested, see Note [Segments].
    """

    _active: ClassVar[list["MemoryRecorder"]] = []
    _segment: ClassVar["_Segment | None"] = None
    _thread: ClassVar[int] = 0  # of all that are active

    def __init__(self, before: PriorStorages | None = None, device: torch.device | None = None) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else every start and stop is printed
        self._before = before or PriorStorages()
        self._device = device
        self._before_bytes = 0  # what the device had handed out at the start
        self._seen = _Seen()

    @classmethod
    def is_free(cls) -> bool:
        """Return whether no profiler is running but recorders of this thread: there can be one only, of any thread."""
        if cls._active:
            return cls._thread == threading.get_ident()
        return not (torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled())

    def start(self) -> None:
        if not self.is_free():
            raise ExecutionError(
                "a run cannot be measured while another profiler is running, maybe on another thread (torch.profiler); "
                "end that first, or plan before it begins"
            )
        if self._device is not None:
            self._before_bytes = allocated_bytes(self._device)
        self._end_segment()
        self._active.append(self)
        MemoryRecorder._thread = threading.get_ident()
        self._begin_segment()

    def stop(self) -> list[tuple[str, int]]:
        self._end_segment()
        self._active.remove(self)
        self._begin_segment()
        self._before.stop()
        seen = self._seen
        if self._device is not None:
            events = [*seen.marks, *self._on_device(self._device, seen)]
        else:
            changes = seen.changes["cpu", 0]
            events = [*seen.marks, *_of_this_recording(changes), *self._before.releases(seen.released_ns)]
            events += _released_elsewhere(seen, changes) if seen.collectives else []
        return [(label, change_bytes) for _, label, change_bytes in sorted(events, key=lambda event: event[0])]

    def _on_device(self, device: torch.device, seen: "_Seen") -> Iterator[tuple[int, str, int]]:
        """See Note [Totals of a device]."""
        own: set[int] = set()
        live_bytes = others_bytes = 0
        for time_ns, address, change_bytes, total_bytes in sorted(seen.changes[device.type, device.index or 0]):
            if change_bytes > 0:
                own.add(address)
            elif address not in own and address not in self._before.addresses:
                others_bytes -= change_bytes
            now_bytes = total_bytes - self._before_bytes + others_bytes
            yield time_ns, "", now_bytes - live_bytes
            live_bytes = now_bytes

    @classmethod
    @contextlib.contextmanager
    def paused(cls) -> Iterator[None]:
        """Record nothing of this thread for a while, see Note [Not while tracing]."""
        if cls._thread != threading.get_ident():
            yield
            return
        cls._end_segment()
        try:
            yield
        finally:
            cls._begin_segment()

    @classmethod
    def _begin_segment(cls) -> None:
        if cls._active:
            cls._segment = _Segment()

    @classmethod
    def _end_segment(cls) -> None:
        """Stop the profiler, and give what it saw to all recorders."""
        if cls._segment is None:
            return
        segment, cls._segment = cls._segment, None
        seen = segment.stop()
        for recorder in cls._active:
            recorder._seen.add(seen)


_Place = tuple[str, int]  # kind and index of a device
_Change = tuple[int, int, int, int]  # time, address, bytes, and what the device has handed out then


@dataclasses.dataclass
class _Seen:
    """What the profiler saw, without its own objects: these do not outlive it."""

    changes: dict[_Place, list[_Change]] = dataclasses.field(default_factory=lambda: defaultdict(list))  # by device
    marks: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)
    released_ns: dict[int, int] = dataclasses.field(default_factory=dict)
    collectives: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # start and end

    def add(self, others: "_Seen") -> None:
        for device, changes in others.changes.items():
            self.changes[device] += changes
        self.marks += others.marks
        self.released_ns |= others.released_ns
        self.collectives += others.collectives

    @classmethod
    def of(cls, roots: Sequence[Any]) -> "_Seen":
        seen = cls()
        for event in _all_events(roots):
            name = event.name
            if event.tag == torch._C._profiler._EventType.Allocation:
                fields = event.extra_fields
                device = fields.device.type, fields.device.index or 0
                total_bytes = 0 if device[0] == "cpu" else fields.total_allocated
                seen.changes[device].append((event.start_time_ns, fields.ptr, fields.alloc_size, total_bytes))
            elif name.startswith(_MARK):
                seen.marks.append((event.start_time_ns, name.removeprefix(_MARK), 0))
            elif name.startswith(_RELEASE):
                seen.released_ns[int(name.removeprefix(_RELEASE))] = event.start_time_ns
            elif name.startswith(_COLLECTIVE):
                seen.collectives.append((event.start_time_ns, event.end_time_ns))
        return seen


class _Segment:
    """One run of the profiler, from the moment it is made, see Note [Segments]."""

    def __init__(self) -> None:
        profiler, enable = torch.autograd.profiler, cast(Any, torch._C._autograd._enable_profiler)
        told = profiler.profile(profile_memory=True)
        self._around = contextlib.ExitStack()
        self._around.enter_context(_without_unknown_blocks())
        torch._C._autograd._prepare_profiler(told.config(create_trace_id=True), told.kineto_activities)
        profiler._run_on_profiler_start()
        # See Note [Threads of a backend].
        enable(told.config(create_trace_id=False), told.kineto_activities, {_OPERATORS})

    def stop(self) -> _Seen:
        """Return what was seen."""
        try:
            results: Any = torch._C._autograd._disable_profiler()
        finally:
            torch.autograd.profiler._run_on_profiler_stop()
            self._around.close()
        return _Seen.of(results.experimental_event_tree())


@contextlib.contextmanager
def _without_unknown_blocks() -> Iterator[None]:
    """Keep torch from printing that it does not know a block that is released, see Note [Allocated before].

    Other warnings of torch's C++ log are not printed meanwhile; those that reach Python are.
    """
    level = _log_level()
    before = None if level is None else level.value
    if level is not None and level.value < _ERROR_LEVEL:
        level.value = _ERROR_LEVEL
    try:
        yield
    finally:
        if level is not None and before is not None:
            level.value = before


def _log_level() -> ctypes.c_int | None:
    """Return the level that torch's C++ code logs from, if this build of torch has it."""
    for name in ("libc10.so", "libc10.dylib", "c10.dll"):
        with contextlib.suppress(OSError, ValueError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    return None


def set_mark(label: str) -> None:
    """Leave a mark among the allocator's events."""
    with torch._C._profiler._RecordFunctionFast(_MARK + label):
        pass


def set_change(change_bytes: int) -> None:
    """Leave a mark that says how much more a run would have in memory from here on, if nothing were in a file."""
    if change_bytes and MemoryRecorder._active:
        set_mark(f"{_CHANGE}{change_bytes}")


def change_of(label: str) -> int | None:
    """Read what `set_change` said; None of other marks."""
    return int(label.removeprefix(_CHANGE)) if label.startswith(_CHANGE) else None


def _all_events(roots: Sequence[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        yield event


def _of_this_recording(changes: list[_Change]) -> list[tuple[int, str, int]]:
    """The changes without releases of what was allocated before, see Note [Allocated before]."""
    live: set[int] = set()
    events = []
    for time_ns, address, change_bytes, _ in sorted(changes, key=lambda change: change[0]):
        if change_bytes > 0:
            live.add(address)
        elif address not in live:
            continue
        else:
            live.remove(address)
        events.append((time_ns, "", change_bytes))
    return events


def _released_elsewhere(seen: _Seen, changes: list[_Change]) -> list[tuple[int, str, int]]:
    """The releases that were not seen, see Note [Released elsewhere]."""
    releases = []
    following: dict[int, tuple[int, int]] = {}  # by address: time and bytes of its next change
    for time_ns, address, change_bytes, _ in sorted(changes, reverse=True):
        next_ns, next_bytes = following.get(address, (0, 0))
        following[address] = time_ns, change_bytes
        if change_bytes < 0 or next_bytes < 0:
            continue
        inside = [span for span in seen.collectives if span[0] <= time_ns <= span[1]]
        releases += [(end_ns, "", -change_bytes) for _, end_ns in inside]
        if not inside and next_bytes > 0:  # it was released, at the latest when its place was taken
            releases.append((next_ns - 1, "", -change_bytes))
    return releases
