"""The message of an out-of-memory error, explained: what each of its numbers is, and what they say together."""

import dataclasses
import re
from collections.abc import Iterator

from memfit.errors import InvalidInput
from memfit.units import format_bytes, parse_bytes

_SIZE = r"([0-9.]+ (?:bytes|B|KiB|MiB|GiB|TiB))"
_BEGINNING = re.compile(r"out of memory\.?\s+Tried to allocate " + _SIZE)
_SMALL_SEGMENT_BYTES = 2 * 2**20
_LARGE_SEGMENT_BYTES = 20 * 2**20
_NOTICEABLE_SHARE = 0.02  # of the device: other processes below it are not worth a sentence
_EXPANDABLE = (
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch is imported; a snapshot given to "
    "`memfit doctor` shows whether that is enough."
)
# As the message says it, in the wording of torch 2.1 and later, and of earlier ones.
_FIGURES = {
    "total_bytes": (rf"total capac(?:i)?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free_bytes": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "process_bytes": (rf"this process has {_SIZE} memory in use",),
    "allowed_bytes": (rf"{_SIZE} allowed",),
    "allocated_bytes": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "private_bytes": (rf"{_SIZE} allocated in private pools",),
    "unallocated_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved_bytes": (rf"{_SIZE} reserved in total by PyTorch", rf"{_SIZE} cached"),
}
_OTHER_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemoryMessage:
    """The numbers of one message; None: it does not say."""

    tried_bytes: int
    device: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    allowed_bytes: int | None = None
    allocated_bytes: int | None = None
    private_bytes: int | None = None
    unallocated_bytes: int | None = None
    reserved_bytes: int | None = None
    other_processes_bytes: int | None = None
    messages: int = 1  # how many there are in the text; this is the last

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that torch could have reserved."""
        if self.reserved_bytes is None or self.free_bytes is None:
            return None
        return self.reserved_bytes + self.free_bytes

    @property
    def outside_bytes(self) -> int | None:
        """Bytes of this process beside torch's allocator: context, libraries, NCCL."""
        if self.process_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.process_bytes - self.reserved_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number with its meaning."""

    label: str
    size_bytes: int
    meaning: str


def read_message(text: str) -> OutOfMemoryMessage:
    """Find the last out-of-memory message in a text and read its numbers."""
    words = " ".join(text.split())
    found = list(_BEGINNING.finditer(words))
    if not found:
        raise InvalidInput(
            "there is no out-of-memory message in this text: it would say 'out of memory. Tried to allocate ...'; "
            "give the error's whole text, or a memory snapshot"
        )
    words = words[found[-1].start() :]
    figures = {name: _figure(words, patterns) for name, patterns in _FIGURES.items()}
    if figures["reserved_bytes"] is None and None not in (figures["allocated_bytes"], figures["unallocated_bytes"]):
        figures["reserved_bytes"] = (figures["allocated_bytes"] or 0) + (figures["unallocated_bytes"] or 0)
    if figures["unallocated_bytes"] is None and None not in (figures["allocated_bytes"], figures["reserved_bytes"]):
        figures["unallocated_bytes"] = (figures["reserved_bytes"] or 0) - (figures["allocated_bytes"] or 0)
    processes = [_bytes(match[1]) for match in _OTHER_PROCESS.finditer(words)]
    others_bytes = _name_processes(figures, processes) if processes else _others(figures)
    device = re.search(r"GPU (\d+)", words)
    return OutOfMemoryMessage(
        tried_bytes=_bytes(found[-1][1]),
        device=None if device is None else int(device[1]),
        other_processes_bytes=others_bytes,
        messages=len(found),
        **figures,
    )


def figures_of(message: OutOfMemoryMessage) -> list[Figure]:
    """List the numbers of a message in the order that explains them."""
    rows = (
        ("asked for", message.tried_bytes, tried_words(message.tried_bytes)),
        ("memory of the device", message.total_bytes, "all of it"),
        ("free on the device", message.free_bytes, "what no process has; the request had to come from here"),
        ("limit of this process", message.allowed_bytes, "set by set_per_process_memory_fraction"),
        ("this process", message.process_bytes, "tensors, cache, CUDA context and libraries"),
        ("tensors", message.allocated_bytes, "allocated by PyTorch: in use when it failed"),
        ("of that in private pools", message.private_bytes, "of CUDA graphs; nobody else can use it"),
        ("cached, not in use", message.unallocated_bytes, "reserved by PyTorch: free pieces between and after tensors"),
        ("outside of PyTorch's allocator", message.outside_bytes, "CUDA context, cuBLAS, cuDNN, NCCL"),
        ("other processes", message.other_processes_bytes if _is_noticeable(message) else None, "on the same device"),
    )
    return [Figure(label=label, size_bytes=size, meaning=words) for label, size, words in rows if size is not None]


def tried_words(tried_bytes: int) -> str:
    """Say what the number after "Tried to allocate" is: the segment, which may be larger than the tensor."""
    if tried_bytes == _SMALL_SEGMENT_BYTES:
        return "a segment for small tensors: the tensor itself has at most 1 MiB"
    if tried_bytes == _LARGE_SEGMENT_BYTES:
        return "a segment for tensors of 1 to 10 MiB, or one tensor of about 20 MiB"
    return "one tensor, rounded up to 2 MiB"


def advice_of(message: OutOfMemoryMessage) -> list[str]:
    """Say what the numbers mean together, and what to do; the most likely cause first."""
    return list(_advice(message))


def _advice(message: OutOfMemoryMessage) -> Iterator[str]:
    if message.free_bytes is not None and message.free_bytes < message.tried_bytes:
        yield f"{format_bytes(message.tried_bytes - message.free_bytes)} were missing for this one request."
    if message.unallocated_bytes is not None:
        yield _fragmentation(message, message.unallocated_bytes)
    others_bytes = message.other_processes_bytes or 0
    if _is_noticeable(message):
        yield (
            f"Other processes hold {format_bytes(others_bytes)} of this device. nvidia-smi names them; an old run of "
            "yours may still be there."
        )
    if message.allowed_bytes is not None:
        yield "This process may use less than the device has: see torch.cuda.set_per_process_memory_fraction."
    if message.total_bytes is not None:
        room_bytes = message.total_bytes - others_bytes - (message.outside_bytes or 0)
        yield (
            f"About {format_bytes(room_bytes)} are there for tensors and cache. `memfit estimate` says what a step "
            "needs, and memfit.fit(model, sample, budget=...) makes it fit."
        )


def _fragmentation(message: OutOfMemoryMessage, unallocated_bytes: int) -> str:
    """Judge what was cached when the request failed: whole free segments had been given back before."""
    cached = format_bytes(unallocated_bytes)
    if unallocated_bytes >= message.tried_bytes:
        return (
            f"Fragmentation: PyTorch had {cached} reserved and not in use, more than was asked for, but not in one "
            f"piece. {_EXPANDABLE}"
        )
    if unallocated_bytes + (message.free_bytes or 0) >= message.tried_bytes:
        return (
            f"In part fragmentation: {cached} that PyTorch had reserved and did not use would have been enough "
            f"together with what was free on the device. {_EXPANDABLE}"
        )
    return (
        f"Not fragmentation: with {cached} that PyTorch had reserved and did not use it would still not have been "
        "enough. The tensors themselves are too many: settings of the allocator will not help."
    )


def _is_noticeable(message: OutOfMemoryMessage) -> bool:
    others_bytes = message.other_processes_bytes or 0
    return message.total_bytes is not None and others_bytes > _NOTICEABLE_SHARE * message.total_bytes


def _name_processes(figures: dict[str, int | None], processes: list[int]) -> int:
    """Sum the other processes; in a container this one is listed like them, and told by what it has reserved."""
    reserved_bytes = figures["reserved_bytes"]
    if figures["process_bytes"] is None and reserved_bytes is not None:
        own = min(processes, key=lambda each: (each < reserved_bytes, each))
        figures["process_bytes"] = own
        return sum(processes) - own
    return sum(processes)


def _others(figures: dict[str, int | None]) -> int | None:
    total, free, process = figures["total_bytes"], figures["free_bytes"], figures["process_bytes"]
    if total is None or free is None or process is None:
        return None
    return max(0, total - free - process)


def _figure(words: str, patterns: tuple[str, ...]) -> int | None:
    for pattern in patterns:
        match = re.search(pattern, words)
        if match is not None:
            return _bytes(match[1])
    return None


def _bytes(text: str) -> int:
    """Read a size as torch writes it.

    >>> _bytes("1.50 GiB"), _bytes("0 bytes")
    (1610612736, 0)
    """
    number, unit = text.split()
    return 0 if float(number) == 0 else parse_bytes(f"{number}{'B' if unit == 'bytes' else unit}")
