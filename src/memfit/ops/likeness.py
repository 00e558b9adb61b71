"""Stretches that are taken to cost what others do, instead of being compiled and measured before there is a plan.

Note [Like others]
    Stretches that make values again, alone or inside another, are many, and differ from each other in sizes more than
    in anything else; compiling each takes about as long. So of those with the same operators two are measured: the
    biggest, and one of about a quarter of its bytes. The others are said to take as long a byte as these do, in
    between by size, and are compiled where a plan has them.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import fx

from memfit.ops.stretch import Stretch

_SMALLER = 4  # times fewer bytes has the second that is measured, about


class Like(NamedTuple):
    """The two that a stretch is like; maybe the same."""

    bigger: Stretch
    smaller: Stretch


Likenesses = Mapping[Stretch, Like]


def likenesses(stretches: Iterable[Stretch]) -> Likenesses:
    """Those that need not be measured, and what each is like, see Note [Like others]."""
    families: dict[tuple[object, ...], list[Stretch]] = defaultdict(list)
    for stretch in dict.fromkeys(stretches):
        families[_family(stretch.graph)].append(stretch)
    found: dict[Stretch, Like] = {}
    for family in families.values():
        biggest = max(family, key=moved_bytes)
        wanted = math.log(moved_bytes(biggest) / _SMALLER)
        smaller = min(family, key=lambda each: abs(math.log(moved_bytes(each)) - wanted))
        measured = Like(biggest, smaller)
        found |= {each: measured for each in family if each not in measured}
    return found


def time_like(stretch: Stretch, like: Like, times_us: Mapping[Stretch, float]) -> float:
    """Microseconds, from those of the two that it is like."""
    bigger_us, smaller_us = (times_us[each] / moved_bytes(each) for each in like)  # of a byte
    distance = math.log(moved_bytes(like.bigger) / moved_bytes(like.smaller))
    part = math.log(moved_bytes(stretch) / moved_bytes(like.smaller)) / distance if distance else 0.0
    part = min(max(part, 0.0), 1.0)
    return moved_bytes(stretch) * (smaller_us + part * (bigger_us - smaller_us))


def moved_bytes(stretch: Stretch) -> int:
    """What it reads and writes."""
    made = [node.meta["val"] for node in stretch.outputs]
    return sum(each.nbytes for each in (*stretch.inputs, *made))


def _family(graph: fx.Graph) -> tuple[object, ...]:
    """The same for graphs of the same operators on tensors that look alike but for their sizes."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    return tuple(
        _look(node.meta["val"])
        if node.op == "placeholder"
        else (str(node.target), tuple(numbers[each] for each in node.all_input_nodes), _dimensions(node))
        for node in graph.nodes
    )


def _dimensions(node: fx.Node) -> str:
    """Along which dimensions an operator works: sums over rows cost otherwise than sums over columns."""
    arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    named = zip(arguments, node.args, strict=False)
    return str([value for argument, value in named if argument.name in ("dim", "dims")])


def _look(value: torch.Tensor) -> tuple[object, ...]:
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda place: -strides[place])
    return value.dtype, str(value.device), tuple(order)
