"""A tier on disk: one file without a name, which is gone when its process is gone, however that ends.

Parts are read and written by a thread of their own into memory of our own, not through a mapping: a full disk or a
failing one is then an error that can be caught, and what is in memory is what was asked for. The
kernel may keep pages of the file while memory is free; it gives them up when somebody needs it.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

import torch

from memfit.errors import ExecutionError, InvalidInput, first_line
from memfit.step.tiers import Place
from memfit.units import format_bytes

_LARGEST_CALL_BYTES = 2**30  # Linux writes at most 2 GiB at once


class DiskTier:
    """Tensors in a file of a directory."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = os.fspath(directory)
        try:
            os.makedirs(directory, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (closed by _release)
        except OSError as error:
            raise InvalidInput(
                f"the optimizer state cannot be put into {self._directory!r}: {first_line(error)}; give a directory "
                "that can be written"
            ) from error
        self._allocated_bytes = 0
        self._used_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memfit-disk-tier")
        self._mappings: list[mmap.mmap] = []
        self._writing: Future[None] | None = None
        self._leaving: list[torch.Tensor] = []
        self._release = weakref.finalize(self, _release, self._thread, self._file)

    def allocate(self, size_bytes: int) -> None:
        """Take room on the disk before anything needs it, so that a full one is found out in time."""
        if size_bytes <= self._allocated_bytes:
            return
        try:
            os.posix_fallocate(self._file.fileno(), 0, size_bytes)
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._allocated_bytes)
            raise ExecutionError(
                f"no room for {format_bytes(size_bytes)} of optimizer state in {self._directory!r}: "
                f"{first_line(error)}; nothing was changed, free some room or give another directory"
            ) from error
        self._allocated_bytes = size_bytes

    def reserve(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Place:
        size_bytes = shape.numel() * dtype.itemsize
        offset = self._used_bytes
        end = offset + -(-size_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self.allocate(end)
        self._used_bytes = end
        mapping = mmap.mmap(self._file.fileno(), size_bytes, offset=offset)
        self._mappings.append(mapping)
        tensor = torch.frombuffer(mapping, dtype=dtype).view(shape)
        return Place(tensor=tensor, device=device, offset_bytes=offset)

    def read(self, place: Place, rows: slice | None) -> "Future[torch.Tensor]":
        shape = place.tensor.shape if rows is None else torch.Size([rows.stop - rows.start])
        part = _buffer(shape, place.tensor.dtype)
        return _Moved(self._thread.submit(self._read, part, _offset(place, rows)), place.device)

    def write(self, place: Place, rows: slice | None, value: torch.Tensor) -> None:
        self._check_written()
        # In a list that is emptied here when it is written: memory that another thread frees is missed by profilers.
        self._leaving = [value.detach().cpu().contiguous()]
        self._writing = self._thread.submit(self._write, self._leaving, _offset(place, rows))

    def wait(self) -> None:
        self._check_written()
        for mapping in self._mappings:  # whoever read through them has what they wanted
            mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._release()

    def _check_written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
            self._leaving.clear()

    def _read(self, part: torch.Tensor, offset: int) -> torch.Tensor:
        _transfer("read", lambda view, at: os.preadv(self._file.fileno(), [view], at), part, offset)
        return part

    def _write(self, leaving: list[torch.Tensor], offset: int) -> None:
        _transfer("write", lambda view, at: os.pwrite(self._file.fileno(), view, at), leaving[0], offset)


class _Moved(Future[torch.Tensor]):
    """Hold what a thread reads; whoever asks moves it, on the stream that computes with it."""

    def __init__(self, reading: Future[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self._reading, self._device = reading, device

    def result(self, timeout: float | None = None) -> torch.Tensor:
        return self._reading.result(timeout).to(self._device)


def _buffer(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _release(thread: ThreadPoolExecutor, file: IO[bytes]) -> None:
    thread.shutdown()
    file.close()


def _transfer(verb: str, call: Callable[[memoryview, int], int], part: torch.Tensor, offset: int) -> None:
    view = _bytes_of(part)
    done = 0
    while done < len(view):
        try:
            moved = call(view[done : done + _LARGEST_CALL_BYTES], offset + done)
        except OSError as error:
            raise ExecutionError(
                f"the disk could not {verb} optimizer state: {first_line(error)}; the parameters are between two "
                "steps, load the last checkpoint"
            ) from error
        if not moved:
            raise ExecutionError("the file of the optimizer state has become shorter; load the last checkpoint")
        done += moved


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _offset(place: Place, rows: slice | None) -> int:
    return place.offset_bytes + (0 if rows is None else rows.start * place.tensor.dtype.itemsize)
