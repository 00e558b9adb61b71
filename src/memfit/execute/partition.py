"""Cut a joint graph into a forward and a backward graph as the eager run would."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memfit import _torch
from memfit.capture.nodes import is_backward, is_random, tensors_of
from memfit.execute.codegen import OVERWRITES
from memfit.ir import Graph

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def eager_partition(graph: Graph) -> Partition:
    """Save what the backward pass reads, overwrite what the eager run overwrites."""
    overwriting = {operation.name for operation in graph.operations if operation.overwrites is not None}

    def partition(
        joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        for node in joint.graph.nodes:
            node.meta[OVERWRITES] = node.name in overwriting
        _skip_detach(joint.graph)
        _keep_draws(joint.graph)
        return _torch.split_joint(joint, _saved(joint.graph), num_fwd_outputs)

    return partition


def _skip_detach(graph: fx.Graph) -> None:
    """Below autograd there is nothing to detach from."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _keep_draws(graph: fx.Graph) -> None:
    """A draw whose result nobody reads still moves the generator."""
    for node in graph.nodes:
        if is_random(node) and not is_backward(node):
            node.meta["partitioner_tag"] = "must_be_in_forward"


def _saved(graph: fx.Graph) -> list[fx.Node]:
    """What the forward pass hands to the backward pass: every tensor that is read there."""
    saved: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if not is_backward(node) or node.op == "placeholder":
            continue
        for source in node.all_input_nodes:
            if not is_backward(source) and not _is_tangent(source) and tensors_of(source):
                saved[source] = None
    return list(saved)


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.name.startswith("tangents")
