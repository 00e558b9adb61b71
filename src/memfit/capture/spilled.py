"""Tensors in a file for a while: what autograd saves for a backward pass, and what a step has made.

Note [Same bits]
    A spilled step runs the operators of the eager step on the same bits. A saved tensor comes back with its dtype,
    shape and strides, and at the same offset from an aligned address, because libraries may sum in another order where
    the alignment differs.

Note [Written once]
    Several operators save one value, or views of it. The file holds a stretch of a storage once, as long as the storage
    lives and nobody writes into it. While an operator has a value in memory again, another one that asks for
    the same value gets that memory.

Note [As if in memory]
    A storage whose tensors are saved would live as long as anybody holds it: the model, autograd, or an operator that
    has it back. Holders of what is in the file are followed in the same way, so it is known at any time how much more
    memory the step would have without the file. Recordings of the allocator's events are told, so that an eager step is
    measured that never was in memory as a whole.
"""

import contextlib
import dataclasses
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memfit import _torch
from memfit._memory_events import set_change
from memfit.accelerator import kinds
from memfit.capture.sample import Sample
from memfit.errors import ExecutionError, first_line
from memfit.tensors import storage_key
from memfit.trees import flatten, unflatten
from memfit.units import format_bytes

SMALLEST_BYTES = 2**14  # of what is worth a place in the file
_ALIGNMENT_BYTES = 64  # of torch's allocator on a CPU
_CHUNK_BYTES = 2**16  # of results, at a time
_LARGEST_CALL_BYTES = 2**30  # Linux writes at most 2 GiB at once


class OverRoom(ExecutionError):
    """The values that a forward pass holds at once take more memory than there is for them."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Stretch:
    """Bytes of a file, and how far from an aligned address they were in memory."""

    offset: int
    size_bytes: int
    lead_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Saved:
    """A saved tensor in a file, as autograd holds it."""

    stretch: _Stretch
    holders: "_Holders"
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device


class SpillFile:
    """A file without a name: gone when it is closed or its process ends, however that happens."""

    def __init__(self, directory: str | None = None, *, expected_bytes: int = 0) -> None:
        """`expected_bytes` is what will be written as far as is known: a disk that is too small is refused at once."""
        self._directory = tempfile.gettempdir() if directory is None else directory
        self.size_bytes = 0
        try:
            free_bytes = shutil.disk_usage(self._directory).free
            if free_bytes < expected_bytes:
                raise ExecutionError(
                    f"a file of {format_bytes(expected_bytes)} is needed in {self._directory!r}, where "
                    f"{format_bytes(free_bytes)} are free; free some room, or set TMPDIR to a bigger disk"
                )
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115  (closed by close)
        except OSError as error:
            raise self._unusable(error) from error

    def __enter__(self) -> "SpillFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def append(self, content: torch.Tensor) -> int:
        """Write the bytes of a flat tensor behind all others, and return where they begin."""
        offset, self.size_bytes = self.size_bytes, self.size_bytes + content.nbytes
        self._transfer(os.pwrite, content.cpu(), offset)
        return offset

    def fill(self, content: torch.Tensor, offset: int) -> None:
        """Read the bytes of a flat tensor."""
        self._transfer(lambda file, part, at: os.preadv(file, [part], at), content, offset)

    def store(self, tensor: torch.Tensor) -> "StoredTensor":
        """Write a whole tensor, a few kilobytes at a time."""
        offsets = [self.append(chunk) for chunk in chunks_of(tensor.detach())]
        return StoredTensor(self, offsets[0], tensor.dtype, tensor.shape, tensor.device)

    def keep(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Remember a tensor and return what gives it back; what has no plain memory is copied."""
        if not is_plain(tensor):
            copy = tensor.detach().clone()
            return lambda: copy
        return self.store(tensor).read

    def _transfer(self, call: Callable[[int, Any, int], int], content: torch.Tensor, offset: int) -> None:
        flat: Any = content.view(torch.uint8).numpy()
        view, done = memoryview(flat), 0
        while done < len(view):
            try:
                moved = call(self._file.fileno(), view[done : done + _LARGEST_CALL_BYTES], offset + done)
            except (OSError, ValueError) as error:  # the second of a file that is closed
                raise self._unusable(error) from error
            if not moved:
                raise self._unusable(OSError("it has become shorter"))
            done += moved

    def _unusable(self, error: Exception) -> ExecutionError:
        return ExecutionError(
            f"tensors cannot be kept in a file in {self._directory!r}: {first_line(error)}; set TMPDIR to a "
            "directory on a disk that can be written and has room"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, in the order of its indices."""

    file: SpillFile
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yield flat parts of the tensor, the same as `chunks_of` yields of the tensor itself."""
        offset = self.offset
        for count in _chunk_sizes(self.shape, self.dtype.itemsize):
            chunk = torch.empty(count, dtype=self.dtype)
            self.file.fill(chunk, offset)
            offset += chunk.nbytes
            yield chunk

    def read(self) -> torch.Tensor:
        """Return the tensor in memory, contiguous."""
        content = torch.empty(self.shape.numel(), dtype=self.dtype)
        self.file.fill(content, self.offset)
        return content.view(self.shape).to(self.device)


def chunks_of(tensor: "torch.Tensor | StoredTensor") -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in the order of its indices, in flat parts of a few kilobytes on the CPU."""
    if isinstance(tensor, StoredTensor):
        yield from tensor.chunks()
    elif tensor.nbytes <= _CHUNK_BYTES or tensor.dim() == 0:
        yield tensor.reshape(-1).contiguous().cpu()
    elif tensor[0].nbytes > _CHUNK_BYTES:
        for row in tensor:
            yield from chunks_of(row)
    else:
        for rows in tensor.split(_CHUNK_BYTES // max(1, tensor[0].nbytes)):
            yield rows.reshape(-1).contiguous().cpu()


def _chunk_sizes(shape: torch.Size, item_bytes: int) -> Iterator[int]:
    """Yield the numbers of elements that `chunks_of` yields."""
    count = shape.numel()
    row_count = count // shape[0] if shape and shape[0] else 0
    if count * item_bytes <= _CHUNK_BYTES or not shape:
        yield count
    elif row_count * item_bytes > _CHUNK_BYTES:
        for _ in range(shape[0]):
            yield from _chunk_sizes(shape[1:], item_bytes)
    else:
        rows = _CHUNK_BYTES // (row_count * item_bytes)
        for start in range(0, shape[0], rows):
            yield min(rows, shape[0] - start) * row_count


@dataclasses.dataclass(frozen=True, slots=True)
class _Argument:
    """A tensor that a call was given, as `SavedTensors` keep it."""

    packed: Any
    requires_grad: bool


class _Holders:
    """Follow the holders of a storage that is in the file, see Note [As if in memory]."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._size_bytes = storage.nbytes()
        self._saved = 0  # tensors that autograd holds
        self._copies = 0  # that were read back and are in use
        self._in_memory_bytes = self._size_bytes
        self._difference_bytes = 0
        self._is_original_there = True
        _at_end_of(storage, self._lose_original)

    @property
    def hold(self) -> bool:
        """Return whether the storage would live, if there were no file."""
        return self._is_original_there or self._saved > 0 or self._copies > 0

    def save(self, saved: _Saved) -> None:
        self._saved += 1
        _at_end_of(saved, self._release)

    def read(self, size_bytes: int) -> None:
        """Count a copy, before it is there."""
        self._change(copies=1, in_memory_bytes=size_bytes)

    def give(self, copy: torch.UntypedStorage, size_bytes: int) -> None:
        _at_end_of(copy, lambda: self._change(copies=-1, in_memory_bytes=-size_bytes))

    def _lose_original(self) -> None:
        self._is_original_there = False
        self._change(in_memory_bytes=-self._size_bytes)

    def _release(self) -> None:
        self._change(saved=-1)

    def _change(self, *, saved: int = 0, copies: int = 0, in_memory_bytes: int = 0) -> None:
        self._saved += saved
        self._copies += copies
        self._in_memory_bytes += in_memory_bytes
        difference_bytes = (self._size_bytes if self.hold else 0) - self._in_memory_bytes
        set_change(difference_bytes - self._difference_bytes)
        self._difference_bytes = difference_bytes


def _at_end_of(thing: Any, call: Callable[[], None]) -> None:
    weakref.finalize(thing, call).atexit = False


class _Room:
    """Counts the storages of saved tensors that somebody else holds in memory, against a limit."""

    def __init__(self, room_bytes: int | None) -> None:
        self._room_bytes = room_bytes
        self._in_memory: dict[_torch.StorageWeakRef, int] = {}

    def take(self, storage: torch.UntypedStorage) -> None:
        if self._room_bytes is None:
            return
        self._in_memory = {each: size for each, size in self._in_memory.items() if not each.expired()}
        self._in_memory[_torch.StorageWeakRef(storage)] = storage.nbytes()
        live_bytes = sum(self._in_memory.values())
        if live_bytes > self._room_bytes:
            raise OverRoom(
                f"the forward pass holds {format_bytes(live_bytes)} of its values at once, where there is room for "
                f"{format_bytes(self._room_bytes)}"
            )


class SavedTensors:
    """Puts what autograd saves into a file and brings it back, see Note [Written once]."""

    def __init__(self, file: SpillFile, kept: Iterable[torch.Tensor], room_bytes: int | None = None) -> None:
        """`kept` stays in memory; `room_bytes` is what values of a forward pass may take there at once."""
        self._file = file
        self._kept = {storage_key(tensor) for tensor in kept}
        self._room = _Room(room_bytes)
        self._written: dict[tuple[_torch.StorageWeakRef, int, int, int], _Stretch] = {}
        self._holders: dict[_torch.StorageWeakRef, _Holders] = {}
        self._present: weakref.WeakValueDictionary[_Stretch, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Write a tensor, unless it is small or stays in memory all the same."""
        if self._stays(tensor):
            return tensor.detach()  # an operator that holds its own result would never be released
        item_bytes = tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start, size_bytes = int(tensor.storage_offset()) * item_bytes, (last + 1) * item_bytes
        storage = tensor.untyped_storage()
        reference = _torch.StorageWeakRef(storage)
        key = (reference, tensor._version, start, size_bytes)
        if key not in self._written:
            self._room.take(storage)
            offset = self._file.append(_bytes_in(storage, start, size_bytes))
            self._written[key] = _Stretch(offset, size_bytes, start % _ALIGNMENT_BYTES)
        if reference not in self._holders:
            self._holders[reference] = _Holders(storage)
        holders = self._holders[reference]
        saved = _Saved(self._written[key], holders, tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        holders.save(saved)
        return saved

    def unpack(self, saved: Any) -> torch.Tensor:
        """Read what `pack` wrote, see Note [Same bits]."""
        if isinstance(saved, torch.Tensor):
            return saved
        stretch, found = saved.stretch, self._present.get(saved.stretch)
        if found is None:
            size_bytes = stretch.lead_bytes + stretch.size_bytes
            saved.holders.read(size_bytes)
            content = torch.empty(size_bytes, dtype=torch.uint8)
            self._file.fill(content[stretch.lead_bytes :], stretch.offset)
            found = content.to(saved.device).untyped_storage()
            self._present[stretch] = found
            saved.holders.give(found, size_bytes)
        empty = torch.empty(0, dtype=saved.dtype, device=saved.device)
        return empty.set_(found, stretch.lead_bytes // saved.dtype.itemsize, saved.shape, saved.stride)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Keep what autograd saves meanwhile; what transforms of `torch.func` save stays in memory."""
        _ACTIVE.append(self)
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack),
                _torch.hooks_aside_in_transforms(),
            ):
                yield
        finally:
            _ACTIVE.remove(self)

    def keep_sample(self, sample: Sample) -> Callable[[], Sample]:
        """Remember what a call was given and return what gives it back: strides, and what is given twice as one."""
        # Leaf by leaf: some containers (packed sequences) hold nothing but tensors.
        leaves, spec = flatten((sample.args, dict(sample.kwargs)))
        packed: dict[int, _Argument] = {}
        for each in leaves:
            if isinstance(each, torch.Tensor) and id(each) not in packed:
                packed[id(each)] = _Argument(self.pack(each), each.requires_grad)
        kept = [packed.get(id(each), each) for each in leaves]

        def read() -> Sample:
            read_back = {id(each): self._read_back(each) for each in packed.values()}
            return Sample(*unflatten([read_back.get(id(each), each) for each in kept], spec))

        return read

    def _read_back(self, argument: _Argument) -> torch.Tensor:
        return self.unpack(argument.packed).detach().requires_grad_(argument.requires_grad)

    def would_live(self, reference: _torch.StorageWeakRef) -> bool:
        """Return whether a storage would be in memory now, if there were no file."""
        holders = self._holders.get(reference)
        return not reference.expired() if holders is None else holders.hold

    def _stays(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is not written; of subclasses and others without plain memory nothing is known."""
        if not is_plain(tensor) or storage_key(tensor) in self._kept:
            return True
        return tensor.untyped_storage().nbytes() < SMALLEST_BYTES


_ACTIVE: list[SavedTensors] = []


def would_live(reference: _torch.StorageWeakRef) -> bool:
    """Return whether a storage is in memory, or would be if there were no file, see Note [As if in memory]."""
    return not reference.expired() or any(saved.would_live(reference) for saved in _ACTIVE)


def lasting_tensors(model: nn.Module, sample: Sample) -> list[torch.Tensor]:
    """Return what is in memory whatever a step saves: parameters, buffers, the batch."""
    return [*model.parameters(), *model.buffers(), *sample.tensors()]


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bits of a tensor are those in its storage."""
    is_strided = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    return is_strided and tensor.device.type in kinds() and not tensor.is_conj() and not tensor.is_neg()


@contextlib.contextmanager
def spilled_activations(
    keep: Iterable[torch.Tensor],
    directory: str | None = None,
    *,
    file: SpillFile | None = None,
    expected_bytes: int = 0,
    room_bytes: int | None = None,
) -> Iterator[SpillFile]:
    """Keep what autograd saves meanwhile in a file, and yield that file; it is gone at the end.

    Args:
        keep: Tensors that are in memory anyway, as parameters, buffers and the batch; views of them stay there too.
        directory: Where the file is; TMPDIR if that is not said.
        file: A file that is there already, which stays open.
        expected_bytes: What will be written as far as is known: too small a disk is refused at once.
        room_bytes: What values of a forward pass may take in memory at once; more raises OverRoom.

    """
    with contextlib.ExitStack() as stack:
        if file is None:
            file = stack.enter_context(SpillFile(directory, expected_bytes=expected_bytes))
        stack.enter_context(SavedTensors(file, keep, room_bytes).active())
        yield file


@contextlib.contextmanager
def dropped_activations(keep: Iterable[torch.Tensor], *, room_bytes: int | None = None) -> Iterator[None]:
    """Let autograd save nothing meanwhile, for a forward pass that is never differentiated."""
    room = _Room(room_bytes)
    kept = {storage_key(tensor) for tensor in keep}

    def drop(tensor: torch.Tensor) -> None:
        if is_plain(tensor) and storage_key(tensor) not in kept:
            room.take(tensor.untyped_storage())

    with torch.autograd.graph.saved_tensors_hooks(drop, _refuse):
        yield


def _refuse(_: None) -> torch.Tensor:
    raise ExecutionError("a backward pass runs behind a forward pass that was run without one; run the step again")


def _bytes_in(storage: torch.UntypedStorage, start: int, size_bytes: int) -> torch.Tensor:
    """Show bytes of a storage as a flat tensor; nothing is copied."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (size_bytes,), (1,))
