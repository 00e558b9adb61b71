"""What says of which kind this machine is."""

import functools
import platform
from pathlib import Path

import torch

_PROCESSORS = Path("/proc/cpuinfo")
_SAYING = ("model name", "flags", "Features")  # beginnings of lines that tell processors apart


@functools.cache
def processor() -> str:
    """What the processor calls itself and can do, and what torch uses of it."""
    try:
        lines = _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    said = sorted({line.partition(":")[2].strip() for line in lines if line.startswith(_SAYING)})
    return " ".join([*(said or [platform.processor()]), platform.machine(), torch.backends.cpu.get_cpu_capability()])
