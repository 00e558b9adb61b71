"""Takes out of a graph what turns a matrix and turns it back: gradients of linear layers come that way.

A turned matrix is the same memory with its strides exchanged, so twice turned it is the tensor it was.
"""

import torch
from torch import fx

from memfit.execute.handover import hand_over

_TURN = torch.ops.aten.t.default
_EXCHANGE = torch.ops.aten.transpose.int


def without_double_turns(graph: fx.Graph) -> None:
    """Let what reads a tensor that was turned twice read the tensor itself."""
    for node in list(graph.nodes):
        source = _twice_turned(node)
        if source is not None:
            node.replace_all_uses_with(source)
            _erase_unread(graph, node)


def _twice_turned(node: fx.Node) -> fx.Node | None:
    """The tensor that a node turns for the second time. What is given to a graph is not made one of its results."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or not _is_turn(node) or not _is_turn(first) or node.args[1:] != first.args[1:]:
        return None
    source = first.args[0]
    assert isinstance(source, fx.Node)
    returned = any(user.op == "output" or user.target is hand_over for user in node.users)
    return None if returned and source.op != "call_function" else source


def _is_turn(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (_TURN, _EXCHANGE) and not node.kwargs


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    (first,) = node.all_input_nodes
    graph.erase_node(node)
    if not first.users:
        graph.erase_node(first)
