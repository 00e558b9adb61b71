"""Find a device by its name, in any spelling, or by its memory."""

import difflib
import re
from collections.abc import Iterator

from memfit.errors import InvalidBudget
from memfit.measure.device_table import CUDA_GRANULARITY_BYTES, DEVICES, Device
from memfit.units import format_bytes, parse_bytes

__all__ = ["CUDA_GRANULARITY_BYTES", "DEVICES", "Device", "find_device", "is_bytes", "usable_bytes"]

_MAKERS = ("nvidia", "geforce", "tesla")
_BOARDS = r"\b(sxm|hbm)\d*e?\b|\bpcie\b"  # what drivers add to names
_SERIES = ("rtx", "gtx")  # that a name may leave out
_NUMBER_WITH_UNIT = r"[0-9.][^a-zA-Z]*[a-zA-Z]*"
_MODEL_DIGITS = 4  # of numbers that name a model by themselves
_FAR_AWAY = 0.4  # of `difflib`: how little a name has to look like a known one
_SOLD_AS_WITHIN = 0.12  # of the memory that a card is sold with: how much less or more its driver tells


def find_device(name: str) -> Device:
    """The device of this name, in any spelling: "a100-40gb", "RTX 4090", "4090", or as its driver tells it.

    >>> find_device("rtx 4090").name, find_device("4090").name, find_device("NVIDIA A100-SXM4-40GB").name
    ('RTX-4090', 'RTX-4090', 'A100-40GB')
    """
    wanted = _parts(name)
    matches = next(filter(None, _matches(wanted)), []) if wanted else []
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
    return re.fullmatch(_NUMBER_WITH_UNIT, text) is not None and not _names_one(text)


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
    plain |= {"".join(_without_series(_parts(each))): each for each in plain.values()}
    near = difflib.get_close_matches(_plain(name), plain, n=6, cutoff=_FAR_AWAY)
    names = [*dict.fromkeys(plain[each] for each in near)][:3]
    return f" (did you mean {' or '.join(names)}?)" if names else ""


def _matches(wanted: list[str]) -> Iterator[list[Device]]:
    """Return what a name can mean, the most certain first.

    A name may leave out the memory, then its series, then its end; or tell a memory that is not part of it.
    """
    names = [(device, _parts(device.name)) for device in DEVICES]
    yield [device for device, parts in names if parts == wanted]
    yield [device for device, parts in names if _without_memory(parts)[0] == wanted]
    yield [device for device, parts in names if _without_series(_without_memory(parts)[0]) == wanted]
    yield [device for device, parts in names if wanted in (parts[: len(wanted)], parts[1:][: len(wanted)])]
    rest, gigabytes = _without_memory(wanted)
    if gigabytes:
        found = [device for device, parts in names if rest in (parts, _without_series(parts))]
        yield [each for each in found if abs(each.memory_bytes / 2**30 / gigabytes - 1) <= _SOLD_AS_WITHIN]


def _without_memory(parts: list[str]) -> tuple[list[str], int]:
    """Take the memory off the end of a name.

    >>> _without_memory(["a", "100", "40", "gb"]), _without_memory(["t", "4"])
    ((['a', '100'], 40), (['t', '4'], 0))
    """
    has_memory = len(parts) > 2 and parts[-1] in ("gb", "gib") and parts[-2].isdecimal()
    return (parts[:-2], int(parts[-2])) if has_memory else (parts, 0)


def _without_series(parts: list[str]) -> list[str]:
    return parts[1:] if parts[0] in _SERIES else parts


def _parts(name: str) -> list[str]:
    """Split a name into words and numbers, without its maker's and its board's.

    >>> _parts("NVIDIA A100-SXM4-40GB")
    ['a', '100', '40', 'gb']
    """
    plain = re.sub(_BOARDS, " ", name.lower().replace("_", " "))
    return [each for each in re.findall(r"[a-z]+|[0-9]+", plain) if each not in _MAKERS]


def _plain(name: str) -> str:
    return "".join(_parts(name))
