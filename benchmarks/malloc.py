"""glibc told to keep big blocks, so that page faults do not hide what operators cost. All sides run alike."""

import os
import sys
from collections.abc import Sequence

MALLOC_SETTINGS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}


def in_settled_malloc(arguments: Sequence[str], module: str) -> None:
    """Begin this process anew with the settings, unless it has them: glibc reads them once, when it starts."""
    if all(os.environ.get(name) == value for name, value in MALLOC_SETTINGS.items()):
        return
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    os.execve(sys.executable, command, {**os.environ, **MALLOC_SETTINGS})
