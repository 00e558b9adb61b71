"""Tell the C library to keep freed memory, for speed, or to return it, so that the process stays small.

glibc hands every block above 32 MB back to the system when it is freed, and the next one like it comes as new pages,
which the system fills with zeros one fault at a time. A training step frees and asks for the same sizes over and over.
docs/kernels.md has what that costs; a preallocated arena would win no more than `keep_freed_memory` does.

Note [Fragmented heap]
    Smaller blocks come from one heap. glibc starts with mappings of their own for blocks above 128 KiB, and raises that
    threshold to the size of each one that is freed, up to 32 MB: after one step most tensors live in the heap. A tensor
    that is freed there leaves a hole that the next, a little bigger, does not fit into. So a process takes a sixth to
    two thirds more than it needs, by an amount that differs from run to run. With a fixed threshold every big block has
    pages of its own, which the system takes back when the block is freed: nothing fragments. docs/kernels.md has what
    was measured.
"""

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # names of glibc's for what `mallopt` sets
_MMAP_THRESHOLD_BYTES = 128 * 2**10  # glibc's own before it adapts; a threshold that is set stays as it is
_MOST_MAPPINGS = 65536  # glibc's own number, which `keep_freed_memory` may have changed
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch asks for huge pages for big tensors if it finds this at the first


def keep_freed_memory() -> bool:
    """Let the C library keep memory that is freed instead of handing it back to the system.

    For training on a CPU, once, before the model is built: steps with big tensors take less time, by a fifth on some
    models, and what the process has ever held it goes on holding. Whether it was done is returned: that is possible
    with glibc alone (Linux), and has no effect if another allocator is preloaded, or on big blocks
    that other threads ask for. The same without a line of code:
    `MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000` in the environment.
    """
    if not _is_glibc():
        return False
    set_option = ctypes.CDLL(None).mallopt
    return bool(set_option(_MMAP_MAX, 0)) and bool(set_option(_TRIM_THRESHOLD, -1))


def release_freed_memory() -> bool:
    """Return freed memory to the system at once, so that the process takes little more than its tensors.

    The opposite of `keep_freed_memory`, for training on a CPU with little memory. Call it once, before the first tensor
    is made. The process then peaks a few percent above the peak of allocated bytes instead of a sixth to two
    thirds above, see Note [Fragmented heap]. The price is time: the system fills fresh pages with zeros for every big
    tensor. A step takes up to 1.7 times as long, and twice to four times where the system has no huge pages to give.
    torch asks for huge pages only if no tensor was made before this call. The function returns whether it was
    done: that is possible with glibc alone (Linux), and has no effect if another allocator is preloaded. The same
    without a line of code: `MALLOC_MMAP_THRESHOLD_=131072 THP_MEM_ALLOC_ENABLE=1` in the environment.
    """
    if not _is_glibc():
        return False
    os.environ.setdefault(_HUGE_PAGES, "1")
    library = ctypes.CDLL(None)
    done = (
        bool(library.mallopt(_MMAP_MAX, _MOST_MAPPINGS))
        and bool(library.mallopt(_TRIM_THRESHOLD, _MMAP_THRESHOLD_BYTES))
        and bool(library.mallopt(_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES))
    )
    library.malloc_trim(0)  # what was freed before this call goes too
    return done


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
