"""Tensors in safetensors files, written and read without a second copy in memory.

The format is a length (8 bytes), a header in JSON, and the tensors one after the other. Reading goes through a
private mapping: pages come from the disk when they are copied and are given back right after.
"""

import dataclasses
import json
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memfit.errors import InvalidFile
from memfit.files import atomic_file, parse_json

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_LARGEST_HEADER_BYTES = 10**8
_COPIED_BYTES = 2**24  # at a time


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whole or not at all."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path, durable=True) as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors.values():
            flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(memoryview(flat))


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a tensor is in a file."""

    dtype: torch.dtype
    shape: torch.Size
    start: int
    stop: int


class TensorFile:
    """A safetensors file that is read piece by piece."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else None
        except OSError as error:
            raise InvalidFile(f"{path} cannot be read: {error.strerror}") from error
        self.metadata, self.entries = self._read_header()

    def copy_into(self, name: str, tensor: torch.Tensor) -> None:
        """Fill a tensor of the same shape, in its own dtype and on its own device, a few megabytes at a time."""
        entry = self.entries[name]
        place = tensor.detach()
        if not place.is_contiguous():
            place.copy_(self._piece(entry, 0, entry.shape.numel()).view(entry.shape))
            return
        place, step = place.view(-1), max(1, _COPIED_BYTES // entry.dtype.itemsize)
        for start in range(0, place.numel(), step):
            stop = min(start + step, place.numel())
            place[start:stop].copy_(self._piece(entry, start, stop))
            self._give_back(entry.start + start * entry.dtype.itemsize, entry.start + stop * entry.dtype.itemsize)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of its own with the file's values."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.copy_into(name, tensor)
        return tensor

    def _piece(self, entry: Entry, start: int, stop: int) -> torch.Tensor:
        if start == stop:
            return torch.empty(0, dtype=entry.dtype)
        assert self._mapping is not None
        first = entry.start + start * entry.dtype.itemsize
        size = (stop - start) * entry.dtype.itemsize
        piece = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=first, count=size)
        aligned = piece if piece.data_ptr() % entry.dtype.itemsize == 0 else piece.clone()
        return aligned.view(entry.dtype)

    def _give_back(self, start: int, stop: int) -> None:
        assert self._mapping is not None
        start -= start % mmap.PAGESIZE
        self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _read_header(self) -> tuple[dict[str, str], dict[str, Entry]]:
        try:
            return self._parse_header()
        except (AssertionError, KeyError, TypeError, ValueError, struct.error) as error:
            raise InvalidFile(
                f"{self.path} is not a safetensors file, or is damaged ({type(error).__name__}: {error}); give the "
                "path of a whole one"
            ) from error

    def _parse_header(self) -> tuple[dict[str, str], dict[str, Entry]]:
        content: Any = b"" if self._mapping is None else self._mapping
        (length,) = struct.unpack("<Q", content[:8])
        _expect(0 < length <= min(_LARGEST_HEADER_BYTES, len(content) - 8), "the header does not fit the file")
        header = parse_json(bytes(content[8 : 8 + length]))
        metadata = header.pop(_METADATA, {})
        base, entries = 8 + length, {}
        for name, found in header.items():
            start, stop = found["data_offsets"]
            shape, dtype = torch.Size(found["shape"]), _DTYPES[found["dtype"]]
            _expect(0 <= start <= stop <= len(content) - base, f"{name!r} lies outside the file")
            _expect(math.prod(shape) * dtype.itemsize == stop - start, f"{name!r} does not have the size of its shape")
            entries[name] = Entry(dtype, shape, base + start, base + stop)
        return metadata, entries


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
