"""Devices that are not here: their memory and speed, from published specifications.

Figures are the vendors' (dense, without sparsity); memory is what the driver reports as total
on such a card, `reserved_bytes` what the driver, the context and the libraries' handles take
before the first tensor. Times that rest on them are estimates and are marked so.
"""

import dataclasses
import difflib
import re

from memfit.errors import InvalidBudget
from memfit.units import format_bytes, parse_bytes

_MIB = 2**20
_MAKERS = ("nvidia", "geforce", "tesla")
_MODEL_DIGITS = 4  # of numbers that name a model by themselves
_FAR_AWAY = 0.4  # of `difflib`: how little a name has to look like a known one
CUDA_GRANULARITY_BYTES = 512  # the caching allocator rounds every block up to this

# Of an RTX 4090 with 24,564 MiB torch tells 23.65 GiB, and a process that ran out of memory there held 0.51 GiB beside
# torch's segments: context, and the kernels of libraries, loaded as they are needed. Before CUDA 11.7 all are loaded at
# once, which takes 1.1 to 1.5 GiB more.
_CUDA_RESERVED_BYTES = 870 * _MIB


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A machine's memory and speed."""

    name: str
    memory_bytes: int
    reserved_bytes: int
    granularity_bytes: int
    bandwidth_gb_per_s: float
    tflops_fp32: float  # as eager torch runs it by default (no TF32)
    tflops_half: float  # fp16 and bf16 with tensor cores where there are any
    launch_us: float  # least time of one operator
    capability: tuple[int, int] | None = None  # CUDA's compute capability; None: no CUDA device

    @property
    def is_cuda(self) -> bool:
        return self.capability is not None

    @property
    def usable_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes


def _cuda(
    name: str, capability: tuple[int, int], memory_mib: int, bandwidth: float, fp32: float, half: float
) -> Device:
    return Device(
        name=name,
        memory_bytes=memory_mib * _MIB,
        reserved_bytes=_CUDA_RESERVED_BYTES,
        granularity_bytes=CUDA_GRANULARITY_BYTES,
        bandwidth_gb_per_s=bandwidth,
        tflops_fp32=fp32,
        tflops_half=half,
        launch_us=5.0,
        capability=capability,
    )


DEVICES = (
    _cuda("T4", (7, 5), 15_360, 320, 8.1, 65),
    _cuda("P100-16GB", (6, 0), 16_280, 732, 9.5, 19),
    _cuda("V100-16GB", (7, 0), 16_384, 900, 15.7, 125),
    _cuda("V100-32GB", (7, 0), 32_768, 900, 15.7, 125),
    _cuda("A10", (8, 6), 23_028, 600, 31.2, 125),
    _cuda("L4", (8, 9), 23_034, 300, 30.3, 121),
    _cuda("L40S", (8, 9), 46_068, 864, 91.6, 362),
    _cuda("A100-40GB", (8, 0), 40_960, 1555, 19.5, 312),
    _cuda("A100-80GB", (8, 0), 81_920, 2039, 19.5, 312),
    _cuda("H100-80GB", (9, 0), 81_559, 3350, 66.9, 989),
    _cuda("H200", (9, 0), 143_771, 4800, 66.9, 989),
    _cuda("B200", (10, 0), 183_359, 8000, 80, 2250),
    _cuda("RTX-3060", (8, 6), 12_288, 360, 12.7, 25),
    _cuda("RTX-3090", (8, 6), 24_576, 936, 35.6, 71),
    _cuda("RTX-4090", (8, 9), 24_564, 1008, 82.6, 165),
    _cuda("RTX-4070-Ti-SUPER", (8, 9), 16_376, 672, 44.1, 88),
    _cuda("RTX-5090", (12, 0), 32_607, 1792, 104.8, 209),
)


def find_device(name: str) -> Device:
    """The device of this name, in any spelling: "a100-40gb", "RTX 4090", "4090".

    >>> find_device("rtx 4090").name, find_device("4090").name
    ('RTX-4090', 'RTX-4090')
    """
    wanted = _parts(name)
    matches = [device for device in DEVICES if _parts(device.name) == wanted]
    for first in (0, 1):  # a whole name may leave its end out, then its first letters: "4090"
        matches = matches or [each for each in DEVICES if wanted and _parts(each.name)[first:][: len(wanted)] == wanted]
    if len(matches) != 1:
        found = f"could be {' or '.join(device.name for device in matches)}" if matches else "is not known"
        found += "" if matches else _nearest(name)
        known = ", ".join(f"{device.name} ({format_bytes(device.memory_bytes)})" for device in DEVICES)
        raise InvalidBudget(f'device {name!r} {found}; known are {known}; or give its memory, such as "24GiB"')
    return matches[0]


def is_bytes(device: str | int | float) -> bool:
    """Whether a device is given by its memory ("24GiB") rather than by its name.

    A bare number in a text names a model where it has no more digits than one.

    >>> is_bytes("24GiB"), is_bytes("4090"), is_bytes(4090), is_bytes("4294967296")
    (True, False, True, True)
    """
    if not isinstance(device, str):
        return True
    text = device.strip()
    if text.isdecimal():
        return len(text) > _MODEL_DIGITS
    return text[:1] in tuple("0123456789.") and not _names_one(text)


def usable_bytes(device: str | int | float) -> int:
    """The memory for tensors of a device given by name or by its bytes."""
    return parse_bytes(device) if is_bytes(device) else find_device(str(device)).usable_bytes


def _names_one(text: str) -> bool:
    """Tell whether a text that begins with a number is a name, such as "4090 Ti"."""
    numbers = [part for device in DEVICES for part in _parts(device.name)[1:] if len(part) >= _MODEL_DIGITS]
    return _parts(text)[0] in numbers and _parts(text)[1:2] not in (["b"], ["kb"], ["mb"], ["gb"], ["mib"], ["gib"])


def _nearest(name: str) -> str:
    """Return known names that look like this one, even from afar."""
    plain = {_plain(device.name): device.name for device in DEVICES}
    near = difflib.get_close_matches(_plain(name), plain, n=3, cutoff=_FAR_AWAY)
    return f" (did you mean {' or '.join(plain[each] for each in near)}?)" if near else ""


def _parts(name: str) -> list[str]:
    """Split a name into words and numbers, without its maker's.

    >>> _parts("NVIDIA A100-40GB")
    ['a', '100', '40', 'gb']
    """
    return [each for each in re.findall(r"[a-z]+|[0-9]+", name.lower()) if each not in _MAKERS]


def _plain(name: str) -> str:
    return "".join(_parts(name))
