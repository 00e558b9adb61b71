"""Ask an accelerator: its memory, its generator, its clock, whatever kind it is.

Note [One question]
    Whether a device is an accelerator is asked here: everything is one that is neither a CPU nor without memory. What
    is asked of it is asked by its index, never of whichever device is the current one, and through the module that
    torch has for its kind (`torch.cuda`), or through `torch.accelerator` where that module lacks it.

Note [Requested bytes]
    An accelerator hands out blocks, which are a little bigger than what was asked for. Peaks are those of blocks, as
    its limits are; what an operator allocates inside is counted as it was asked for, as sizes of tensors are.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memfit.errors import InvalidModel

GRANULARITY_BYTES = 512  # caching allocators round every block up to this

_WITHOUT = ("cpu", "meta")


def is_accelerator(device: torch.device | str) -> bool:
    """Return whether a device has a memory of its own, see Note [One question]."""
    return torch.device(device).type not in _WITHOUT


def kinds() -> tuple[str, ...]:
    """Return the kinds of devices that a step may run on in this process; asked at every call."""
    own = _kind_here()
    return ("cpu", "cuda") if own is None or own == "cuda" else ("cpu", "cuda", own)


def _kind_here() -> str | None:
    found: torch.device | None = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def accelerators_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the accelerators that tensors are on, each once."""
    found = {tensor.device for tensor in tensors if is_accelerator(tensor.device)}
    return sorted(found, key=lambda device: (device.type, device.index or 0))


def initialized_accelerators() -> list[torch.device]:
    """Return all accelerators of this process, if it has begun to use them; asking begins nothing."""
    kind = _kind_here()
    if kind is None:
        return []
    module: Any = torch.get_device_module(kind)
    there = module.device_count() if module.is_available() and module.is_initialized() else 0
    return [torch.device(kind, index) for index in range(there)]


def accelerator_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the one accelerator that tensors are on; None if they are on none."""
    found = accelerators_of(tensors)
    if len(found) > 1:
        raise InvalidModel(
            f"the tensors of this step are on several devices ({', '.join(map(str, found))}), and its memory is "
            "followed on one; move all of them to one, and split models over processes instead (memfit.distributed)"
        )
    return found[0] if found else None


def indexed(device: torch.device | str) -> torch.device:
    """Return a device with its index: that of the current one if none is said."""
    place = torch.device(device)
    if ":" in str(place) or not is_accelerator(place):
        return place
    return torch.device(place.type, _ask(place, "current_device", "current_device_index")())


def device_of_backend() -> torch.device:
    """Return where the default process group takes tensors: this rank's accelerator, if its backend is that of one."""
    import torch.distributed as dist

    backend = dist.get_backend()
    if "gloo" in backend or backend in ("mpi", "ucc", "fake"):
        return torch.device("cpu")
    kind = "cuda" if backend == "nccl" else _kind_here()
    return torch.device("cpu") if kind is None else indexed(kind)


def name_of_device(device: torch.device | str) -> str:
    """Return the name of the hardware."""
    place = torch.device(device)
    named = getattr(torch.get_device_module(place), "get_device_name", None)
    return place.type if named is None else str(named(indexed(place)))


# Memory


def free_bytes(device: torch.device | str) -> int:
    """Count what the driver has left, and what torch's caching allocator has reserved and does not use."""
    place = indexed(device)
    left_bytes, _ = _ask(place, "mem_get_info", "get_memory_info")(place)
    stats = _stats(place)
    return int(left_bytes) + stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]


def allocated_bytes(device: torch.device) -> int:
    """Return what an accelerator has handed out."""
    return _stats(device)["allocated_bytes.all.current"]


class MemoryWatch:
    """How far the memory of a device rises above where it is now, see Note [Requested bytes]."""

    def __init__(self, device: torch.device, *, requested: bool = False) -> None:
        self._device = device
        self._counter = "requested_bytes" if requested else "allocated_bytes"
        synchronize(device)
        _ask(device, "reset_peak_memory_stats")(device)
        self._before_bytes = self._read("current")

    def rise_bytes(self) -> int:
        """Return how far it has risen at the most."""
        synchronize(self._device)
        return self._read("peak") - self._before_bytes

    def _read(self, which: str) -> int:
        return _stats(self._device)[f"{self._counter}.all.{which}"]


def blocks_bytes(size_bytes: int) -> int:
    """Return what a tensor of some bytes takes on an accelerator."""
    return -(-size_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES


def _stats(device: torch.device) -> Mapping[str, int]:
    stats: Mapping[str, int] = _ask(device, "memory_stats")(device)
    return defaultdict(int, stats)  # empty before the first allocation


# Time


def synchronize(device: torch.device | str) -> None:
    """Wait until an accelerator has done all that it was asked for; a CPU has done it already."""
    if is_accelerator(device):
        _ask(torch.device(device), "synchronize")(torch.device(device))


def timed_event(device: torch.device) -> torch.Event:
    """Note a moment on the current stream: launches run ahead of it, so the clock of the host would not do."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


# Generators


def generator_states(devices: Sequence[torch.device]) -> dict[str, torch.Tensor]:
    """Return where the default generators of the CPU and of some accelerators stand, by device."""
    own = {str(device): torch.get_device_module(device).get_rng_state(device) for device in devices}
    return {"cpu": torch.get_rng_state(), **own}


def set_generator_states(states: dict[str, torch.Tensor]) -> None:
    """Put generators where they stood."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(name).set_rng_state(state, torch.device(name))


@contextlib.contextmanager
def generators_kept(devices: Sequence[torch.device]) -> Iterator[None]:
    """Put generators back at the end; the state of the CPU's is kept outside of the memory of tensors."""
    state = bytearray(torch.get_rng_state().numpy().tobytes())
    own = {str(device): torch.get_device_module(device).get_rng_state(device) for device in devices}
    try:
        yield
    finally:
        set_generator_states(own)
        torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off for every kind of device that it is on for."""
    with contextlib.ExitStack() as stack:
        for kind in kinds():
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _ask(device: torch.device, name: str, general: str | None = None) -> Callable[..., Any]:
    """Return what the module of a device's kind has under a name, or what `torch.accelerator` has in its place."""
    own = getattr(torch.get_device_module(device), name, None)
    found: Callable[..., Any] = own if own is not None else getattr(torch.accelerator, general or name)
    return found
