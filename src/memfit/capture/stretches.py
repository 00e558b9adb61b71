"""Graphs of stretches: cut out of a captured graph, cut down to one of their values, put one into another.

A graph here is a small one of primitive operators, with `meta["val"]` on its nodes and a list of results.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memfit import _torch
from memfit.capture.autocast import autocast, autocast_state
from memfit.capture.kept_graphs import keep_graph, kept_graph
from memfit.capture.nodes import shows
from memfit.capture.runs import Run
from memfit.ops.lean import is_backward, is_worth_it, same_layout
from memfit.ops.stretch import digest_of

_SMALL_PART = 1 / 16  # of what is made again: results below that are kept and read rather than made again


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A graph, and the nodes of the captured graph that its placeholders stand for."""

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]


def cut_out(run: Run) -> Piece:
    """A run as a graph of its own, of primitive operators."""
    copied: dict[fx.Node, fx.Node] = {}
    inputs: list[fx.Node] = []
    graph = fx.Graph()
    inside = set(run.members)

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copied:
            if node in inside or shows(node):
                copied[node] = graph.node_copy(node, copy_of)
            else:
                inputs.append(node)
                copied[node] = _placeholder(graph, node.meta["val"], len(inputs))
        return copied[node]

    for member in run.members:  # in their order, so that a graph does not depend on who reads what first
        copy_of(member)
    graph.output([copied[node] for node in run.outputs])
    primitive, read = _primitive(_sorted(graph))
    return Piece(graph=primitive, inputs=tuple(inputs[place] for place in read))


def _sorted(graph: fx.Graph) -> fx.Graph:
    """Placeholders first: they are found on the way."""
    for node in reversed([each for each in graph.nodes if each.op == "placeholder"]):
        graph._root.append(node)
    return graph


def _primitive(graph: fx.Graph) -> tuple[fx.Graph, tuple[int, ...]]:
    """A graph on primitive operators, made once for equal ones, and the places of the inputs that it reads.

    Operators name arguments that they do not read: the running statistics, in the backward pass.
    """
    digest = digest_of(graph)
    if digest not in _PRIMITIVE:
        values = [node.meta["val"] for node in _placeholders(graph)]
        with _torch.detect_fake_mode(values) or contextlib.nullcontext():
            kept = kept_graph(digest)
        made = kept or _decomposed(graph, values, digest)
        read = tuple(place for place, node in enumerate(_placeholders(made)) if node.users)
        for node in _placeholders(made):
            if not node.users:
                made.erase_node(node)
        _PRIMITIVE[digest] = made, read
    return _PRIMITIVE[digest]


def _decomposed(graph: fx.Graph, values: Sequence[torch.Tensor], digest: str) -> fx.Graph:
    with autocast(autocast_state(), enabled=False):  # what it casts is in the graph already
        made = _torch.decomposed(fx.GraphModule({}, graph), values).graph
    made.eliminate_dead_code()
    keep_graph(digest, made)
    return made


_PRIMITIVE: dict[str, tuple[fx.Graph, tuple[int, ...]]] = {}


def arranged(piece: Piece, outputs: Sequence[fx.Node]) -> tuple[Piece, tuple[fx.Node, ...]]:
    """The same with an input and a result first that can be one memory, if there are such; and the results' nodes.

    See Note [Over the first] in `ops/stretch.py`.
    """
    results: Any = piece.graph.output_node().args[0]
    fits = [
        (source, result)
        for source, node in enumerate(piece.inputs)
        for result, made in enumerate(results)
        if node.op != "placeholder"
        and all(user.op == "output" for user in made.users)
        and same_layout(node.meta["val"], made.meta["val"])
        and is_worth_it(node.meta["val"])
    ]
    if not fits:
        return piece, tuple(outputs)
    # What was made last is the likeliest to die here: a gradient rather than an activation.
    source, result = max(fits, key=lambda pair: is_backward(piece.inputs[pair[0]]))
    inputs = _first(piece.inputs, source)
    graph = fx.Graph()
    values = {node: _placeholder(graph, node.meta["val"], number) for number, node in enumerate(inputs, start=1)}
    graph.output(_first(_copied(graph, piece, values), result))
    return Piece(graph=graph, inputs=tuple(inputs)), tuple(_first(outputs, result))


def _first(items: Sequence[Any], place: int) -> list[Any]:
    return [items[place], *items[:place], *items[place + 1 :]]


def made_again(piece: Piece, place: int, results: Sequence[fx.Node]) -> Piece | None:
    """What makes one result of a stretch again, from its inputs and its small results; `results` by place.

    None if that is all the stretch does.
    """
    outputs: Any = piece.graph.output_node().args[0]
    wanted = outputs[place]
    known = _small_results(outputs, place, results)
    inputs = dict(zip(_placeholders(piece.graph), piece.inputs, strict=True))
    return _needed(piece.graph, wanted, known, inputs)


def _small_results(outputs: Sequence[fx.Node], place: int, results: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Small results behind the views they end in, and the nodes that have them in the captured graph."""
    limit = _SMALL_PART * outputs[place].meta["val"].numel()
    known: dict[fx.Node, fx.Node] = {}
    for output, result in zip(outputs, results, strict=True):
        source: fx.Node = output
        while source.op == "call_function" and source.target in _RESHAPES:
            source = source.all_input_nodes[0]
        value = output.meta["val"]
        if source.op == "call_function" and value.numel() <= limit and value.is_contiguous():
            known.setdefault(source, result)
    return known


def _needed(
    graph: fx.Graph, wanted: fx.Node, known: dict[fx.Node, fx.Node], inputs: dict[fx.Node, fx.Node]
) -> Piece | None:
    needed: set[fx.Node] = set()
    waiting = [wanted]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node in known else node.all_input_nodes
    makers = {node for node in needed if node.op == "call_function" and node not in known}
    if len(makers) == sum(node.op == "call_function" for node in graph.nodes):
        return None
    smaller = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    read: list[fx.Node] = []
    for node in graph.nodes:
        if node in needed and (node in known or node.op == "placeholder"):
            outside = known.get(node) or inputs[node]
            read.append(outside)
            copied[node] = _placeholder(smaller, outside.meta["val"], len(read))
    for node in graph.nodes:
        if node in needed and node in known:
            copied[node] = _like(smaller, copied[node], node)
        elif node in makers:
            copied[node] = smaller.node_copy(node, copied.__getitem__)
    smaller.output([copied[wanted]])
    return Piece(graph=smaller, inputs=tuple(read))


def _like(graph: fx.Graph, placeholder: fx.Node, node: fx.Node) -> fx.Node:
    """A result that is given, in the shape it had before the views it ends in."""
    value = node.meta["val"]
    if placeholder.meta["val"].shape == value.shape:
        return placeholder
    view = graph.call_function(torch.ops.aten.view.default, (placeholder, list(value.shape)))
    view.meta["val"] = value
    return view


def put_into(piece: Piece, inner: dict[fx.Node, Piece]) -> Piece:
    """A graph that makes some of its inputs itself; `inner` says how, by the nodes it would read."""
    graph = fx.Graph()
    read: dict[fx.Node, fx.Node] = {}
    pieces = [piece, *(inner[node] for node in piece.inputs if node in inner)]
    for each in pieces:
        for node in each.inputs:
            if node not in read and node not in inner:
                read[node] = _placeholder(graph, node.meta["val"], len(read) + 1)

    def value(node: fx.Node) -> fx.Node:
        if node not in read:
            (read[node],) = _copied(graph, inner[node], {each: value(each) for each in inner[node].inputs})
        return read[node]

    graph.output(_copied(graph, piece, {node: value(node) for node in piece.inputs}))
    return Piece(graph=graph, inputs=tuple(node for node in read if node not in inner))


def _copied(graph: fx.Graph, piece: Piece, values: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    copied = {own: values[node] for own, node in zip(_placeholders(piece.graph), piece.inputs, strict=True)}
    for node in piece.graph.nodes:
        if node.op == "call_function":
            copied[node] = graph.node_copy(node, copied.__getitem__)
    results: Any = piece.graph.output_node().args[0]
    return [copied[node] for node in results]


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _placeholder(graph: fx.Graph, value: torch.Tensor, number: int) -> fx.Node:
    node = graph.placeholder(f"value_{number}")
    node.meta["val"] = value
    return node


_RESHAPES = {
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    operator.pos,
}
