"""Find weights that an embedding shares with another layer, and add the embedding's gradient into the other's.

The captured backward hands out one gradient for each of two, and autograd adds them; of more, and of a parameter that
is used several times by one name, the graph has the sums. Here it makes them without the embedding's gradient in full.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from memfit.capture.nodes import write_call
from memfit.capture.tied_gradients import gradients_by_weight
from memfit.capture.trace import Joint
from memfit.ops.tied_embedding import add_embedding_gradient

aten = torch.ops.aten


def tie(joint: Joint) -> bool:
    """Rewrite the graph for every shared embedding; whether there was one."""
    graph = joint.graph_module.graph
    output = graph.output_node()
    pairs = list(_pairs(graph, output))
    for place, other in pairs:
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        embedding: Any = results[place]
        gradient, words, _, padding_word, _ = embedding.args
        with graph.inserting_before(embedding):
            total = write_call(
                graph, embedding, add_embedding_gradient, (results[other], gradient, words, padding_word)
            )
        results[place], results[other] = None, total
        output.args = (results,)
        graph.erase_node(embedding)
    sums = [node for node in graph.nodes if _is_sum_with_embedding(node)]
    for node in sums:
        _write_as_rows(graph, node)
    return bool(pairs or sums)


def _is_sum_with_embedding(node: fx.Node) -> bool:
    """Whether a node adds an embedding's gradient, which nobody else reads, to another one."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    total, embedding = node.args
    if not isinstance(total, fx.Node) or not isinstance(embedding, fx.Node) or not _is_of_embedding(embedding):
        return False
    value, own = total.meta["val"], embedding.meta["val"]
    return total is not embedding and len(embedding.users) == 1 and (value.shape, value.dtype) == (own.shape, own.dtype)


def _write_as_rows(graph: fx.Graph, node: fx.Node) -> None:
    total, embedding = node.args
    assert isinstance(embedding, fx.Node)
    gradient, words, _, padding_word, _ = embedding.args
    with graph.inserting_before(node):
        rows = write_call(graph, node, add_embedding_gradient, (total, gradient, words, padding_word))
    node.replace_all_uses_with(rows)
    graph.erase_node(node)
    graph.erase_node(embedding)


def _pairs(graph: fx.Graph, output: fx.Node) -> Iterator[tuple[int, int]]:
    """Places among the results: of an embedding's gradient, and of the other gradient of the same weight."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    results: Any = output.args[0]
    for gradients in gradients_by_weight(graph).values():
        embeddings = [place for place in gradients if _is_of_embedding(results[place])]
        if len(gradients) != 2 or len(embeddings) != 1:
            continue
        (place,) = embeddings
        (other,) = (each for each in gradients if each != place)
        fits = results[other].meta["val"].shape == results[place].meta["val"].shape
        alone = len(results[place].users) == 1 and results.count(results[other]) == 1
        if fits and alone and places[results[other]] < places[results[place]]:
            yield place, other


def _is_of_embedding(node: fx.Node) -> bool:
    """Whether a gradient is an embedding's own, not weighted by how often a word occurs."""
    return node.target is aten.embedding_dense_backward.default and node.args[4] is False
