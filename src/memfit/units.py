"""Bytes in and out of words: `"6GiB"` to 6442450944 and back."""

import math
import numbers
import re

from memfit.errors import InvalidBudget

_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = _BINARY | _DECIMAL
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(quantity: int | float | str) -> int:
    """Read a number of bytes from a number or a string with a unit.

    >>> parse_bytes("6GiB")
    6442450944
    >>> parse_bytes("1.5 GB")
    1500000000
    >>> parse_bytes(4096)
    4096
    """
    if not _is_quantity(quantity):
        raise InvalidBudget(f"a number of bytes is needed, {quantity!r} was given")
    number: int | float
    if isinstance(quantity, str):
        number, factor = _split_quantity(quantity)
    else:
        number, factor = quantity, 1
    size_bytes = number * factor
    if not (1 <= size_bytes < math.inf):
        raise InvalidBudget(
            f"a number of bytes must be at least 1 and finite, {quantity!r} was given; "
            'write for example "6GiB" or 6442450944'
        )
    return int(size_bytes)


def _is_quantity(given: object) -> bool:
    return isinstance(given, str | numbers.Real) and not isinstance(given, bool)


def _split_quantity(quantity: str) -> tuple[float, int]:
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise InvalidBudget(f'{quantity!r} is not a number of bytes; write for example "6GiB", "500MB" or 6442450944')
    number, unit = match.groups()
    factor = _UNITS.get((unit or "B").upper())
    if factor is None:
        raise InvalidBudget(f"unknown unit {unit!r} in {quantity!r}; known are {', '.join(_UNIT_NAMES)}")
    return float(number), factor


_UNIT_NAMES = ("B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size_bytes: int | float) -> str:
    """Write a number of bytes for people, in binary units.

    >>> format_bytes(6442450944)
    '6.00 GiB'
    >>> format_bytes(812)
    '812 B'
    """
    size = float(size_bytes)
    if abs(size) < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1024:
            return f"{size:.2f} {unit}"
    return f"{size / 1024:.2f} TiB"
