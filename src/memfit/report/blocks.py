"""Repeated blocks in few words: `model.layers.0-31 (32 of 772.03 MiB)`."""

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from memfit.units import format_bytes

Fact = TypeVar("Fact", bound=Hashable)

_BLOCK = re.compile(r"(?P<path>(?:.*[^0-9])?)(?P<number>0|[1-9][0-9]*)")  # "layers.3", "encoder_layer_3"


def equal_blocks_as_one(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Labels and bytes, biggest first; blocks of one list that are equally big share a label.

    >>> equal_blocks_as_one({"h.0": 5, "h.1": 5, "h.3": 5, "h.2": 7, "head": 8, "h.04": 5})
    [('h.0-1,3 (3 of 5 B)', 15), ('head', 8), ('h.2', 7), ('h.04', 5)]
    """
    rows = []
    for label, size_bytes, count in equal_blocks(sizes):
        each = f" ({count} of {format_bytes(size_bytes)})" if count > 1 else ""
        rows.append((label + each, size_bytes * count))
    return sorted(rows, key=lambda row: -row[1])


def equal_blocks(facts: Mapping[str, Fact]) -> list[tuple[str, Fact, int]]:
    """A label, what is known of each, and how many there are: blocks of one list of which the same is known are one.

    >>> equal_blocks({"stem": 1, "h.0": 5, "h.2": 5, "h.1": 7})
    [('stem', 1, 1), ('h.0,2', 5, 2), ('h.1', 7, 1)]
    """
    lists: dict[tuple[str, Fact, bool], list[str]] = {}
    for module, fact in facts.items():
        block = _BLOCK.fullmatch(module)
        key = (block["path"], fact, True) if block else (module, fact, False)
        lists.setdefault(key, []).append(block["number"] if block else "")
    return [
        (path + (ranges(map(int, numbers)) if is_block else ""), fact, len(numbers))
        for (path, fact, is_block), numbers in lists.items()
    ]


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as people write them.

    >>> ranges([4, 0, 2, 1])
    '0-2,4'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
