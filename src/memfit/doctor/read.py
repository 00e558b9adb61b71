"""Read a file with a memory history, whatever form it has, and run nothing of it."""

import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

from memfit.collecting import collected_later
from memfit.doctor.compact import compact_history, is_compact
from memfit.doctor.plain_pickle import load_plain
from memfit.doctor.snapshot import histories_of
from memfit.errors import InvalidFile, InvalidInput
from memfit.plan.allocator.history import MemoryHistory
from memfit.units import format_bytes

_GZIP = b"\x1f\x8b"
_PICKLE = b"\x80"  # every pickle since protocol 2
_ZIP = b"PK\x03\x04"
_MOST_BYTES = 4 * 2**30


def is_history(content: bytes) -> bool:
    """Tell a history from the text of a message, by how it begins."""
    return content.startswith((_GZIP, _PICKLE, _ZIP)) or content.lstrip()[:1] in (b"{", b"[")


def read_file(path: Path) -> bytes:
    """Read a file whole, unpacked."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{str(path)!r} cannot be read ({error.strerror or error}); give another path") from None
    return unpacked(content)


def read_histories(content: bytes, name: str) -> list[MemoryHistory]:
    """Read the history of every device in a snapshot, a pickle or JSON; those without anything are left out."""
    with collected_later():  # a snapshot is millions of objects that stay
        data = _data(content)
        histories = [compact_history(data, name)] if is_compact(data) else histories_of(data, name)
    if not histories:
        raise InvalidFile(
            "the snapshot is empty: no device had memory, and nothing was recorded; call "
            "torch.cuda.memory._record_memory_history() before what you want to look at"
        )
    for history in histories:
        _check(history)
    return histories


def _data(content: bytes) -> Any:
    if content.startswith(_ZIP):
        raise InvalidFile(
            "this is an archive, as torch.save writes it, and not a memory snapshot; "
            "write one with torch.cuda.memory._dump_snapshot(path)"
        )
    if content.startswith(_PICKLE):
        return load_plain(content)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidFile(f"this is neither a pickle nor whole JSON ({error}); dump the snapshot again") from None


def unpacked(content: bytes) -> bytes:
    """Unpack what gzip packed; anything else stays as it is."""
    if not content.startswith(_GZIP):
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            unpacked = file.read(_MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidFile(f"the packed file is damaged or cut off ({error}); copy it again") from None
    if len(unpacked) > _MOST_BYTES:
        raise InvalidFile(f"unpacked, the file is larger than {format_bytes(_MOST_BYTES)}; record less")
    return unpacked


def _check(history: MemoryHistory) -> None:
    """Refuse segments whose blocks do not fill them: everything after rests on that."""
    for segment in history.segments:
        filled_bytes = sum(block.size_bytes for block in segment.blocks)
        if filled_bytes != segment.size_bytes:
            raise InvalidFile(
                f"the segment at {segment.address:#x} has {segment.size_bytes} bytes and blocks of {filled_bytes}; "
                "the snapshot is damaged, dump it again"
            )
