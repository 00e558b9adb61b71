"""Repeated blocks in few words: `model.layers.0-31 (32 of 772.03 MiB)`."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from memfit.units import format_bytes

_BLOCK = re.compile(r"(?P<path>(?:.*[^0-9])?)(?P<number>0|[1-9][0-9]*)")  # "layers.3", "encoder_layer_3"


def equal_blocks_as_one(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Labels and bytes, biggest first; blocks of one list that are equally big share a label.

    >>> equal_blocks_as_one({"h.0": 5, "h.1": 5, "h.3": 5, "h.2": 7, "head": 8, "h.04": 5})
    [('h.0-1,3 (3 of 5 B)', 15), ('head', 8), ('h.2', 7), ('h.04', 5)]
    """
    rows: list[tuple[str, int]] = []
    lists: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for module, size_bytes in sizes.items():
        if block := _BLOCK.fullmatch(module):
            lists[block["path"], size_bytes].append(int(block["number"]))
        else:
            rows.append((module, size_bytes))
    for (path, size_bytes), numbers in lists.items():
        each = f" ({len(numbers)} of {format_bytes(size_bytes)})" if len(numbers) > 1 else ""
        rows.append((path + ranges(numbers) + each, size_bytes * len(numbers)))
    return sorted(rows, key=lambda row: -row[1])


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
