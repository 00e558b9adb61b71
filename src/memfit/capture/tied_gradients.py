"""Add up the gradients of a parameter that has several names, in the order in which the eager run does.

Note [Order of tied gradients]
    A trace has an input for each name of a parameter (an embedding of words for an encoder, one for a decoder, a head)
    and hands out a gradient for each. Autograd adds them when the backward pass is over, in the order of the names; all
    are there at once. In the eager run they are added as they come, in the order in which they are made. Of two, the
    sum is the same. Of more it is rounded otherwise, and takes a gradient more for every name: so the graph adds them.
"""

from typing import Any

import torch
from torch import fx

from memfit.capture.nodes import write_call
from memfit.tensors import storage_key

aten = torch.ops.aten

_SUM_IS_THE_SAME = 2  # gradients, in either order


def add_up_as_eager(graph: fx.Graph) -> None:
    """Hand out one gradient of what has more than two, see Note [Order of tied gradients]."""
    output = graph.output_node()
    order = {node: place for place, node in enumerate(graph.nodes)}
    *_, last_given = (node for node in graph.nodes if node.op == "placeholder")
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for places in gradients_by_weight(graph).values():
        if len(places) <= _SUM_IS_THE_SAME:
            continue
        gradients = sorted((results[place] for place in places), key=order.__getitem__)
        for place in places:
            results[place] = None
        results[places[0]] = _sum(graph, gradients, order, last_given)
    output.args = (results,)


def _sum(graph: fx.Graph, gradients: list[fx.Node], order: dict[fx.Node, int], last_given: fx.Node) -> fx.Node:
    """Add each gradient when it is made; it may be given, or be the same as the one before."""
    total, *others = gradients
    for gradient in others:
        behind = max((total, gradient, last_given), key=order.__getitem__)
        with graph.inserting_after(behind):
            total = write_call(graph, gradient, aten.add.Tensor, (total, gradient))
        order[total] = order[behind]  # of two at one place the sum is the later
    return total


def gradients_by_weight(graph: fx.Graph) -> dict[int, list[int]]:
    """By the memory of a parameter: the places of its gradients among the results."""
    output = graph.output_node()
    parameters = {
        node.meta["desc"]: storage_key(node.meta["val"])
        for node in graph.nodes
        if node.op == "placeholder" and type(node.meta["desc"]).__name__ == "ParamAOTInput"
    }
    found: dict[int, list[int]] = {}
    results: Any = output.args[0]
    for place, (result, description) in enumerate(zip(results, output.meta["desc"], strict=True)):
        weight = parameters.get(getattr(description, "grad_of", None))
        if isinstance(result, fx.Node) and weight is not None:
            found.setdefault(weight, []).append(place)
    return found
