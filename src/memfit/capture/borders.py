"""Which gradients would be added up in another order at the border of a part.

Note [Sums at the border]
    What a part is given, or a parameter of it, may be used several times. Autograd adds the gradients of all uses one
    by one, those of the latest uses first. A captured part adds those of its own uses and hands on the sum. If there
    are several of these, and uses outside that come later than the first of them, the whole is rounded otherwise.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from memfit import _torch

Edge = tuple[Any, int]  # a node of autograd, and one of its outputs
Uses = dict[Edge, list[float]]  # by edge: when its uses were recorded, in ascending numbers


def edges_of(tensors: Iterable[torch.Tensor]) -> list[Edge]:
    """Return where the gradients of tensors go."""
    found = [_edge_of(each) for each in tensors if each.requires_grad]
    return [(each.node, each.output_nr) for each in found if each is not None]


def _edge_of(tensor: torch.Tensor) -> GradientEdge | None:
    """Return where a tensor's gradient goes: nowhere for a view that was taken without gradients, of what wants one."""
    try:
        return get_gradient_edge(tensor)
    except AssertionError:
        return None


def uses_inside(outputs: Sequence[Edge], given: Sequence[Edge]) -> Uses:
    """Return the uses of what a part is given, and of its parameters, between that and its outputs."""
    wanted = {*given}
    uses = _uses(outputs, {node for node, _ in given})
    return {edge: each for edge, each in uses.items() if edge in wanted or hasattr(edge[0], "variable")}


def all_uses(outputs: Sequence[Edge]) -> Uses:
    """Return the uses of everything behind a model's outputs, which a loss uses last."""
    uses = _uses(outputs, set())
    for edge in outputs:
        uses[edge].append(math.inf)
    return uses


def places_of_inner(outputs: Sequence[torch.Tensor]) -> list[int]:
    """Return which outputs others are computed from, in the order in which they are computed."""
    places = [place for place, each in enumerate(outputs) if each.requires_grad]
    edges = edges_of(outputs)
    uses = _uses(edges, set())
    inner = [(place, edge) for place, edge in zip(places, edges, strict=True) if edge in uses]
    return [place for place, (node, _) in sorted(inner, key=lambda each: _torch.sequence_number(each[1][0]))]


def reaches_otherwise(node: Any, outputs: Iterable[torch.Tensor]) -> bool:
    """Return whether gradients of some outputs reach other results of a function than those of others do."""
    reached = set()
    for edge in edges_of(outputs):
        behind = {edge, *_uses([edge], {node})}
        reached.add(frozenset(number for each, number in behind if each is node))
    return len(reached - {frozenset()}) > 1


def uses_of(outputs: Sequence[torch.Tensor], given: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    """Yield for each thing a call is given when it was used behind outputs, in ascending numbers."""
    uses = _uses(edges_of(outputs), set())
    for each in given:
        edges = edges_of([each]) if isinstance(each, torch.Tensor) else []
        yield tuple(sorted(int(number) for edge in edges for number in uses.get(edge, ())))


def are_added_otherwise(inside: Uses, everywhere: Uses) -> bool:
    """Return whether a sum would be another, see Note [Sums at the border]."""
    return any(
        len(own) > 1 and sum(use >= min(own) for use in everywhere[edge]) > len(own) for edge, own in inside.items()
    )


def _uses(outputs: Sequence[Edge], ends: set[Any]) -> defaultdict[Edge, list[float]]:
    uses: defaultdict[Edge, list[float]] = defaultdict(list)
    seen = {node for node, _ in outputs} - ends
    waiting = [*seen]
    while waiting:
        node = waiting.pop()
        for following, number in node.next_functions:
            if following is None:
                continue
            uses[following, number].append(_torch.sequence_number(node))
            if following not in ends and following not in seen:
                seen.add(following)
                waiting.append(following)
    return uses
