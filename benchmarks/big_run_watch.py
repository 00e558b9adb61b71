"""What a process of the big run takes while it runs: its memory, and where the time of a step goes."""

import contextlib
import dataclasses
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch

from memfit.step import disk_tier
from memfit.step.disk_tier import DiskTier
from memfit.step.parts import PartUpdates
from memfit.step.tiers import TieredState

_STATUS, _IO = Path("/proc/self/status"), Path("/proc/self/io")
_PERIOD_S = 0.02  # between two looks at the memory


def status_bytes(name: str) -> int:
    """One field of what the kernel says of this process, as VmData (private memory) or VmHWM (the most in RAM)."""
    line = next(each for each in _STATUS.read_text().splitlines() if each.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


class MemoryWatch:
    """The most private memory (VmData) that this process has, looked at many times a second."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def take_peak_bytes(self) -> int:
        """The most since the last time this was asked."""
        peak_bytes, self.peak_bytes = max(self.peak_bytes, status_bytes("VmData")), 0
        return peak_bytes

    def _look(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self.peak_bytes = max(self.peak_bytes, status_bytes("VmData"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent:
    """Where the time of one step goes. Reads and writes run beside the rest, in a thread of their own."""

    step_s: float
    update_s: float  # of that: in updates, also those inside the backward pass
    wait_s: float  # of the updates: waiting for reads and writes
    read_s: float
    write_s: float
    read_bytes: int
    write_bytes: int
    storage_read_bytes: int  # that came from the disk itself, not from the kernel's cache
    storage_write_bytes: int

    @property
    def pass_s(self) -> float:
        """Forward and backward."""
        return self.step_s - self.update_s


class Clock:
    """Reads where the time of steps goes; `watching` puts it around the updates and the transfers of a disk tier."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._bytes: dict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def timed(self, run: Callable[[], Any]) -> tuple[Any, Spent]:
        """Run one step; what it returns, and where its time went."""
        self._seconds.clear()
        self._bytes.clear()
        before = _storage_bytes()
        with self.part("step"):
            result = run()
        after = _storage_bytes()
        seconds, moved = self._seconds, self._bytes
        return result, Spent(
            step_s=seconds["step"],
            update_s=seconds["update"],
            wait_s=seconds["wait"],
            read_s=seconds["read"],
            write_s=seconds["write"],
            read_bytes=moved["read"],
            write_bytes=moved["write"],
            storage_read_bytes=after["read_bytes"] - before["read_bytes"],
            storage_write_bytes=after["write_bytes"] - before["write_bytes"],
        )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around everything a step does by parts and on disk."""
        transfer = disk_tier._transfer

        def watched(verb: str, call: Callable[[memoryview, int], int], part: torch.Tensor, offset: int) -> None:
            with self.part(verb):
                transfer(verb, call, part, offset)
            self._bytes[verb] += part.numel() * part.element_size()

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(disk_tier, "_transfer", watched))
            for owner, method, name in (
                (PartUpdates, "update", "update"),
                (TieredState, "arrived", "wait"),
                (DiskTier, "write", "wait"),
            ):
                stack.enter_context(mock.patch.object(owner, method, self._around(getattr(owner, method), name)))
            yield

    def _around(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return method(*args, **kwargs)

        return run


def _storage_bytes() -> dict[str, int]:
    lines = (line.partition(":") for line in _IO.read_text().splitlines())
    return {name: int(value) for name, _, value in lines}
