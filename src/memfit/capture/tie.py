"""Find weights that an embedding shares with another layer, and add the embedding's gradient into the other's.

The captured backward hands out one gradient for each of the two, and autograd adds them. Here the graph adds them
itself, without making the embedding's gradient in full, and hands out one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from memfit.capture.nodes import write_call
from memfit.capture.trace import Joint
from memfit.ops.tied_embedding import add_embedding_gradient
from memfit.tensors import storage_key

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
    return bool(pairs)


def _pairs(graph: fx.Graph, output: fx.Node) -> Iterator[tuple[int, int]]:
    """Places among the results: of an embedding's gradient, and of the other gradient of the same weight."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    results: Any = output.args[0]
    for gradients in _gradients_by_weight(graph, output).values():
        embeddings = [place for place in gradients if _is_of_embedding(results[place])]
        if len(gradients) != 2 or len(embeddings) != 1:
            continue
        (place,) = embeddings
        (other,) = (each for each in gradients if each != place)
        fits = results[other].meta["val"].shape == results[place].meta["val"].shape
        alone = len(results[place].users) == 1 and results.count(results[other]) == 1
        if fits and alone and places[results[other]] < places[results[place]]:
            yield place, other


def _gradients_by_weight(graph: fx.Graph, output: fx.Node) -> dict[int, list[int]]:
    """By the memory of a parameter: the places of its gradients among the results."""
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


def _is_of_embedding(node: fx.Node) -> bool:
    """Whether a gradient is an embedding's own, not weighted by how often a word occurs."""
    return node.target is aten.embedding_dense_backward.default and node.args[4] is False
