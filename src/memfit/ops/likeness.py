"""Stretches that are taken to cost what others do, instead of being compiled and measured before there is a plan.

Note [Like others]
    Stretches that make values again, alone or inside another, are many, and differ from each other in sizes more than
    in anything else; compiling each takes about as long. So of those with the same operators the biggest is measured.
    The others are said to take as much longer, or less long, than what they stand for as that one does, and are
    compiled where a plan has them: what they stand for is measured at every size.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from memfit.ops.stretch import Stretch

Likenesses = Mapping[Stretch, Stretch]  # what is not measured, and which one it is like


def likenesses(stretches: Iterable[Stretch]) -> Likenesses:
    """Those that need not be measured, and what each is like, see Note [Like others]."""
    families: dict[tuple[object, ...], list[Stretch]] = defaultdict(list)
    for stretch in dict.fromkeys(stretches):
        families[_family(stretch.graph)].append(stretch)
    found: dict[Stretch, Stretch] = {}
    for family in families.values():
        biggest = max(family, key=moved_bytes)
        found |= {each: biggest for each in family if each is not biggest}
    return found


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
