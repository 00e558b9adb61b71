"""What memfit keeps on disk between processes: how much it is, and how to get rid of it.

Note [Only its own]
    `MEMFIT_CACHE_DIR` may be a folder in which others keep files too. So nothing is looked at or removed but files
    whose whole path is one that memfit gives, hashes and all, or, where a name has no hash, which begin as memfit
    begins them; links are not followed.
"""

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from memfit.files import cache_folder

_NAMES = {  # by kind: folder and name
    "costs of operators": ("", r"[^/]+_torch-[^/]+_\d+-threads\.json"),
    "memory of processes": (r"process/", r"[^/]+_torch-[^/]+_\d+-threads\.json"),
    "graphs of stretches": (r"graphs/[0-9a-f]{16}/", r"[0-9a-f]{16}\.json"),
    "places of kernels": (r"kernels/[0-9a-f]{16}/", r"[0-9a-f]{16}_?\.json"),
    "plans": (r"plans/[^/]+-[0-9a-f]{24}/", r"[0-9a-f]{24}\.json"),
}
_UNFINISHED = "unfinished files"  # of processes that were killed while they wrote, see `atomic_file` in `files.py`
_PATHS = {kind: re.compile(folder + name) for kind, (folder, name) in _NAMES.items()} | {
    _UNFINISHED: re.compile("|".join(rf"{folder}\.{name}\.\d+\.\d+" for folder, name in _NAMES.values()))
}
_BEGINNINGS = {  # by kind without a hash in its names
    "costs of operators": '"format": "memfit.costs"',
    "memory of processes": '"format": "memfit.process"',
}
_DAY_S = 24 * 60 * 60
_WRITTEN_DAYS = 1 / 24  # what was touched within the hour may be somebody's who is still writing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """The files of one kind."""

    kind: str
    files: int
    size_bytes: int
    unused_days: float | None  # since the last of them was used; None: there are none


class _File(NamedTuple):
    path: Path
    size_bytes: int
    unused_days: float  # since it was written or read, as far as the file system knows of reads


def kept() -> list[Kept]:
    """Everything that is kept, by kind."""
    return [_summary(kind, _files(kind)) for kind in _PATHS]


def clear(*, unused_days: float = 0.0) -> list[Kept]:
    """Remove what was not used for so many days; what was removed, by kind."""
    return [_summary(kind, _removed(kind, unused_days)) for kind in _PATHS]


def _removed(kind: str, unused_days: float) -> Iterator[_File]:
    for file in list(_files(kind)):
        if unused_days > 0 and file.unused_days < unused_days:
            continue
        with contextlib.suppress(FileNotFoundError):  # another process is as tidy
            file.path.unlink()
            yield file
        if file.path.parent != cache_folder():
            with contextlib.suppress(OSError):  # there is more in it
                file.path.parent.rmdir()


def _files(kind: str) -> Iterator[_File]:
    """See Note [Only its own]."""
    folder = cache_folder()
    for parent, folders, names in os.walk(folder, onerror=_raise):
        depth = len(Path(parent).relative_to(folder).parts)
        folders[:] = sorted(folders) if depth < 2 else []
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_symlink() or not _PATHS[kind].fullmatch(path.relative_to(folder).as_posix()):
                continue
            with contextlib.suppress(FileNotFoundError):  # another process is as tidy
                state = path.stat()
                unused_days = max(0.0, time.time() - max(state.st_mtime, state.st_atime)) / _DAY_S
                may_be_written = kind == _UNFINISHED and unused_days < _WRITTEN_DAYS
                if not may_be_written and _begins(path, _BEGINNINGS.get(kind, ""), state):
                    yield _File(path, state.st_size, unused_days)


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _begins(path: Path, beginning: str, state: os.stat_result) -> bool:
    """Whether something stands at the beginning of a file; looking there is not using it."""
    if not beginning:
        return True
    with path.open(encoding="utf-8", errors="replace") as file:
        found = beginning in file.read(len(beginning) + 8)
    with contextlib.suppress(OSError):  # not ours to write
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    return found


def _summary(kind: str, found: Iterable[_File]) -> Kept:
    files = list(found)
    return Kept(
        kind=kind,
        files=len(files),
        size_bytes=sum(each.size_bytes for each in files),
        unused_days=min((each.unused_days for each in files), default=None),
    )
