"""Files that are written whole or not at all, and where memfit's own are."""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where memfit keeps what it found out: `MEMFIT_CACHE_DIR`, or the user's cache folder."""
    chosen = os.environ.get("MEMFIT_CACHE_DIR")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("memfit"))


def own_version() -> str:
    """The version of memfit, by which what it keeps is told apart; "" if it is run from its sources."""
    try:
        return importlib.metadata.version("memfit")
    except importlib.metadata.PackageNotFoundError:
        return ""


def parse_json(text: str | bytes) -> Any:
    """Return what a file that others may have written says; a `ValueError` if it is no JSON, or nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def hash_of(content: Any) -> str:
    """The same for the same numbers, words and lists of them, in any process; others are taken as they are written."""
    return _hash(json.dumps(content, default=str))


def write_checked(path: Path, content: Any, *, label: str = "") -> None:
    """Write JSON with a label and a hash of it before it, for `read_checked`."""
    text = json.dumps(content)
    write_atomically(path, f"{label}{_hash(text)}\n{text}")


def read_checked(path: Path, *, label: str = "") -> Any:
    """Return what `write_checked` wrote; None if there is nothing, or if it is not what was written, which is said."""
    try:
        begin, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        log.warning("what was kept in %s cannot be read (%s) and is left out", path, error)
        return None
    except UnicodeDecodeError:
        begin, text = "", ""
    if begin != f"{label}{_hash(text)}":
        log.warning("what was kept in %s is damaged, or of another version, and left out", path)
        return None
    return json.loads(text)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old content or the new, never a part."""
    with atomic_file(path) as file:
        file.write(text.encode("utf-8"))


@contextlib.contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Write a file so that a reader sees the old content or the new, never a part.

    `durable` also outlives a loss of power: the content is on the disk before the name is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
    # Not tempfile.mkstemp: a report is for others to read too, as far as the umask allows.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    if durable:
        _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
