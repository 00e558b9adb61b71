"""Freed memory that stays with the process, so that big tensors find pages that are there already.

glibc hands every block above 32 MB back to the system when it is freed, and the next one like it comes as new pages,
which the system fills with zeros one fault at a time. A training step frees and asks for the same sizes over and over.
docs/kernels.md has what that costs; a preallocated arena would win no more than this does.
"""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of glibc's for what `mallopt` sets


def keep_freed_memory() -> bool:
    """Let the C library keep memory that is freed instead of handing it back to the system.

    For training on a CPU, once, before the model is built: steps with big tensors take less time, by a fifth on some
    models, and what the process has ever held it goes on holding. Whether it was done is returned: that is possible
    with glibc alone (Linux), and has no effect if another allocator is preloaded, or on big blocks
    that other threads ask for. The same without a line of code:
    `MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000` in the environment.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    set_option = ctypes.CDLL(None).mallopt
    return bool(set_option(_MMAP_MAX, 0)) and bool(set_option(_TRIM_THRESHOLD, -1))
