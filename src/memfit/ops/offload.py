"""Kept activations in the next memory tier: host memory for a GPU, a file for a CPU. Exact, and only on request.

Note [Tickets]
    What is kept in memory for a value in a file is a ticket, one number. The place in the file is given back when the
    ticket is gone, whoever held it: a backward pass that ran, or a graph that was never differentiated.
    Its memory tells: autograd may hold that by another tensor than the one that was made, as under hooks for saved
    tensors.

Note [Asynchronous]
    A value is written into the kernel's cache of the file, as fast as memory, and goes to the disk while the step
    goes on; the cache is given up when memory is needed. The backward pass reads in the reverse of the order the
    forward pass wrote: whenever a value is read, the kernel is asked to bring in the one that was written before
    it. On a GPU, copies run beside the computation, see Note [A stream of its own] in `transfers.py`: programs bring
    values back some operations before they are read (`plan/prefetch.py`), and what is read first waits for its copy.
"""

import os
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memfit import _torch
from memfit.accelerator import is_accelerator
from memfit.errors import ExecutionError, first_line
from memfit.ops.lean import Alternative, LeanOperator, Site, in_memory_order, is_worth_it, value_of
from memfit.transfers import transfers_of
from memfit.units import format_bytes

SMALLEST_BYTES = 2**18  # of what is worth a transfer
_FIRST_TICKET = 2**32  # smaller ones are made up, by whoever runs the functions to measure them
_PAGE_BYTES = 4096


def send_out(values: torch.Tensor) -> torch.Tensor:
    """A copy in the next tier: a tensor in host memory, or a ticket for a place in a file."""
    if is_accelerator(values.device):
        if _is_fake(values):
            return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype)
        return transfers_of(values.device).to_host(values)
    ticket = torch.empty((), dtype=torch.int64)
    if not _is_fake(values):
        _file().write(ticket, values)
    return ticket


def bring_back(
    form: torch.Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The values that `send_out` copied; on an accelerator they are on their way, see `arrived`."""
    if is_accelerator(device):
        if _is_fake(form):
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return transfers_of(device).to_device(form)
    values = torch.empty_strided(shape, stride, dtype=dtype)
    if not _is_fake(form) and int(form) >= _FIRST_TICKET:
        _file().read(int(form), values)
    return values


class _File:
    """A file without a name: gone when its process is gone, however that ends."""

    def __init__(self) -> None:
        directory = tempfile.gettempdir()
        try:
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (closed with us)
        except OSError as error:
            raise ExecutionError(
                f"activations cannot be put into a file in {directory!r}: {first_line(error)}; set TMPDIR to a "
                'directory on a disk that can be written, or plan without "offload"'
            ) from error
        weakref.finalize(self, self._file.close)
        self.process = os.getpid()
        self._lock = threading.RLock()  # a ticket may go while a place is looked for
        self._end_bytes = 0
        self._next_ticket = _FIRST_TICKET
        self._places: dict[int, tuple[int, int]] = {}  # by ticket: offset and size; the newest last
        self._free: dict[int, list[int]] = defaultdict(list)  # by size: offsets

    def write(self, ticket: torch.Tensor, values: torch.Tensor) -> None:
        """Find a place for values, and note it on a ticket."""
        size_bytes = values.numel() * values.element_size()
        with self._lock:
            number, self._next_ticket = self._next_ticket, self._next_ticket + 1
            offset = self._free[size_bytes].pop() if self._free[size_bytes] else self._room_for(size_bytes)
            self._places[number] = offset, size_bytes
        weakref.finalize(ticket.untyped_storage(), self._give_back, number)
        ticket.fill_(number)
        self._transfer(os.pwrite, _bytes_of(values), offset)

    def read(self, number: int, values: torch.Tensor) -> None:
        """Copy what a ticket is for; the value that was written before it is asked for."""
        with self._lock:
            if number not in self._places:
                raise ExecutionError(
                    "an activation was asked for that is not in its file any more; plan this model again"
                )
            offset, _ = self._places[number]
            before = self._places.get(number - 1)
        if before is not None:
            os.posix_fadvise(self._file.fileno(), *before, os.POSIX_FADV_WILLNEED)
        view = _bytes_of(values)
        self._transfer(lambda file, part, at: os.preadv(file, [part], at), view, offset)

    def _room_for(self, size_bytes: int) -> int:
        start = self._end_bytes
        end = start + -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        try:
            os.posix_fallocate(self._file.fileno(), start, end - start)
        except OSError as error:
            raise ExecutionError(
                f"no room for {format_bytes(end)} of activations in a file in {tempfile.gettempdir()!r}: "
                f"{first_line(error)}; free some room, or set TMPDIR to a directory on a bigger disk"
            ) from error
        self._end_bytes = end
        return start

    def _give_back(self, number: int) -> None:
        with self._lock:
            offset, size_bytes = self._places.pop(number)
            self._free[size_bytes].append(offset)

    def _transfer(self, call: Any, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                moved = call(self._file.fileno(), view[done:], offset + done)
            except OSError as error:
                raise ExecutionError(
                    f"the file of the activations cannot be used: {first_line(error)}; run the step again, with TMPDIR "
                    'set to another disk or planned without "offload"'
                ) from error
            if not moved:
                raise ExecutionError("the file of the activations has become shorter; run the step again")
            done += moved


_files: list[_File] = []


def _file() -> _File:
    """The file of this process; a fork has its own."""
    if not _files or _files[-1].process != os.getpid():
        _files[:] = [_File()]
    return _files[-1]


def _bytes_of(values: torch.Tensor) -> memoryview:
    flat: Any = in_memory_order(values).view(torch.uint8).numpy()
    return memoryview(flat)


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, _torch.FakeTensor)


def _alternatives(site: Site) -> Iterator[Alternative]:
    value = value_of(site.node)
    if value is None or not site.is_kept or not site.makes_memory or not is_worth_it(value):
        return
    if value.numel() * value.element_size() >= SMALLEST_BYTES:
        form = Alternative(function=send_out, args=(site.node,), of=site.node, form="tier")
        yield form
        layout = (list(value.shape), list(value.stride()), value.dtype, value.device)
        yield Alternative(function=bring_back, args=(form, *layout), of=site.node)


OFFLOAD = LeanOperator(
    name="offload",
    technique="offload",
    keeps="any big activation in the next memory tier: host memory for a GPU, a file in TMPDIR for a CPU",
    exact=True,
    functions=(send_out, bring_back),
    alternatives=_alternatives,
)
