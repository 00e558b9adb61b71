"""Ask the kernel for the memory of this process, and for the most it had."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

HIGH_WATER_RESET = Path("/proc/self/clear_refs")
_RESET = "5"  # what the kernel wants to see there
_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Return what of this process is in memory."""
    return status_bytes("VmRSS")


def high_water_bytes() -> int:
    """Return the most that was in memory since the start, or since the last reset."""
    return status_bytes("VmHWM")


def reset_high_water() -> None:
    """Let the high-water mark start anew from what is in memory now."""
    HIGH_WATER_RESET.write_text(_RESET, encoding="ascii")


def process_rise(run: Callable[[], Any]) -> int:
    """Run once and return how far the memory of the process rises above where it was."""
    reset_high_water()
    before_bytes = resident_bytes()
    run()
    return max(0, high_water_bytes() - before_bytes)


def status_bytes(name: str) -> int:
    """Read a figure that the kernel keeps of this process, such as VmData."""
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        found, _, rest = line.partition(":")
        if found == name:
            return int(rest.split()[0]) * 1024
    raise OSError(f"{_STATUS} has no {name}")
