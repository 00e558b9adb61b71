"""Make one view of a chain of views, such as the heads of attention: `select`, `view`, `transpose`, `view`.

A view takes a microsecond whatever its size, which counts in steps of small operators.

Note [Known layout]
    `as_strided` does not ask how its tensor is laid out. So a chain is only collapsed behind operators that make a
    contiguous tensor with a storage of its own from whatever they are given. All else may be laid out otherwise than in
    the trace, as what is computed from a gradient is that arrives in another layout.
"""

import torch
from torch import fx

from memfit.execute.codegen import OVERWRITES

CONTIGUOUS = "memfit_contiguous"  # mark on nodes, see Note [Known layout]
_FEWEST_VIEWS = 3  # `as_strided` takes as long as two views
_aten = torch.ops.aten
_MAKERS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}
_VIEWS = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.expand.default,
}


def mark_contiguous(graph: fx.Graph) -> None:
    """Mark what is contiguous in every run, also where a pass only reads it."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta[CONTIGUOUS] = _is_contiguous(node)


def collapse_views(graph: fx.Graph) -> None:
    """Let readers of a chain of views read one view of what is behind it."""
    for node in list(graph.nodes):
        if _is_view(node) and any(not _is_view(user) for user in node.users):
            root, length = _behind(node)
            if length >= _FEWEST_VIEWS and root.meta.get(CONTIGUOUS) and not root.meta.get(OVERWRITES):
                _collapse(graph, node, root)


def _is_contiguous(node: fx.Node) -> bool:
    if node.target is _aten.clone.default:
        return node.kwargs.get("memory_format") is torch.contiguous_format
    return node.target in _MAKERS


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _VIEWS


def _behind(node: fx.Node) -> tuple[fx.Node, int]:
    length = 0
    while _is_view(node):
        (node,) = node.all_input_nodes
        length += 1
    return node, length


def _collapse(graph: fx.Graph, node: fx.Node, root: fx.Node) -> None:
    value, whole = node.meta["val"], root.meta["val"]
    sizes = (*value.shape, *value.stride(), *whole.shape, value.storage_offset(), whole.storage_offset())
    if not whole.is_contiguous() or not all(type(size) is int for size in sizes):
        return
    first = value.storage_offset() - whole.storage_offset()
    with graph.inserting_before(node):
        args = (root, [*value.shape], [*value.stride()], *([first] if first else []))
        short = graph.call_function(_aten.as_strided.default, args)
    short.meta = dict(node.meta)
    node.replace_all_uses_with(short)
    while _is_view(node) and not node.users:
        (source,) = node.all_input_nodes
        graph.erase_node(node)
        node = source
