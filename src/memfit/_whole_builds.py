"""Compiled kernels and headers that stand in Inductor's cache whole or not at all.

Note [Built beside its place]
    A compiler writes its result where Inductor looks for it, and what stands there is taken for the result. Of a
    process that is killed together with its compiler, as by a scheduler, half a file stays: compilers refuse every
    kernel behind half a precompiled header, and half a library fails or ends each later process. So compilers write
    into a folder beside, and what is whole is moved to its place; for torch.compile in the same process too. What an
    older or another program has left is thrown away when a kernel cannot be compiled.

Rests on `codecache._worker_compile_cpp`, by which Inductor has kernels and their headers compiled, and on `_output` and
`_target_file` of its `CppBuilder`, which the compiler's command is written from.
"""

import contextlib
import copy
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_PREFIX = "memfit-"  # of folders beside
_LEFT_S = 60 * 60  # after which nobody is still compiling in one


@functools.cache
def build_whole_files() -> None:
    """Have Inductor's compilers write as in Note [Built beside its place] from now on."""
    from torch._inductor import codecache

    codecache._worker_compile_cpp = _build_all


def _build_all(lock_path: str, cpp_builders: Sequence[Any]) -> None:
    """Do what Inductor's function of this place does."""
    from torch._inductor.codecache import LOCK_TIMEOUT
    from torch.utils._filelock import FileLock

    with FileLock(lock_path, timeout=LOCK_TIMEOUT):
        for builder in cpp_builders:
            if not os.path.exists(builder.get_target_file_path()):
                build_whole(builder)


def build_whole(builder: Any) -> None:
    """Let a `CppBuilder` write its file, whole or not at all."""
    target = Path(builder.get_target_file_path())
    with folder_beside(target) as folder:
        result = folder / target.name
        other = copy.copy(builder)
        other._target_file = str(result)
        other._output = builder._output.replace(str(target), str(result))
        other.build()
        result.replace(target)


@contextlib.contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """A folder on the same disk as a file to be made; what killed processes left of theirs goes, too."""
    for left in target.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process is as tidy
            if time.time() - left.stat().st_mtime > _LEFT_S:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_PREFIX) as folder:
        yield Path(folder)


@functools.cache
def throw_headers_away() -> None:
    """Remove precompiled headers, once in a process: a kernel could not be compiled, and one may be damaged."""
    from torch._inductor import codecache

    for header in Path(codecache._HEADER_DIR).glob("*.[gp]ch"):
        with contextlib.suppress(OSError):  # another process is as tidy
            header.unlink()
