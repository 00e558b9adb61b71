"""Questions to ask a node of torch's joint graph."""

import contextlib
import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from memfit import _torch
from memfit.capture.record import ANNOTATION, Mark, is_drawing
from memfit.ops.lean import is_backward
from memfit.tensors import storage_key, tensors_in

TECHNIQUE = "memfit_technique"  # on alternatives: the lean operator they belong to
REMAKES = "memfit_remakes"  # on alternatives that make a value again: the node whose value it is
FORM_OF = "memfit_form_of"  # on alternatives that make a smaller form: the node whose value it is, and the form's name

_NO_MARK = Mark(module="", source="", in_place=False)


INHERITED = ("custom", "partitioner_tag", "autograd_backward", "seq_nr")  # marks of a node that what replaces it takes


def write_call(graph: fx.Graph, like: fx.Node, function: Any, args: tuple[Any, ...]) -> fx.Node:
    """A new call in the place and with the marks of a node; what it makes is learned without memory."""
    node = graph.call_function(function, args)
    node.meta = {key: like.meta[key] for key in INHERITED if key in like.meta}
    values = pytree.tree_map_only(fx.Node, lambda source: source.meta["val"], args)
    with torch.no_grad(), _torch.detect_fake_mode(values) or contextlib.nullcontext():
        node.meta["val"] = function(*values)
    return node


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors a node stands for: one, several, or none."""
    return tensors_in(node.meta.get("val"))


def arguments_of(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with fake tensors in the place of nodes."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
        fx.Node, lambda source: source.meta["val"], (node.args, dict(node.kwargs))
    )
    return arguments


def mark_of(node: fx.Node) -> Mark:
    """What the Recorder knows of the call that made this node, or that this node differentiates."""
    mark: Mark = (node.meta.get("custom") or {}).get(ANNOTATION, _NO_MARK)
    return mark


def is_operator(node: fx.Node) -> bool:
    """Whether a node calls an operator, rather than picking one of several results."""
    return node.op == "call_function" and node.target is not operator.getitem


def is_alternative(node: fx.Node) -> bool:
    """Whether a node is another way to get a value, see Note [Alternatives] in `ir.py`."""
    return TECHNIQUE in node.meta


def autograd_node(node: fx.Node) -> int | None:
    """The number of the autograd node that made this node, None in the forward pass."""
    number: int | None = node.meta.get("seq_nr") if is_backward(node) else None
    return number


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a generator."""
    return is_drawing(node.target, node.args, node.kwargs)


def is_view(node: fx.Node) -> bool:
    """Whether a node shows the storage of one of its inputs rather than making its own."""
    if not is_operator(node):
        return False
    own = {storage_key(tensor) for tensor in tensors_of(node)}
    return any(storage_key(tensor) in own for source in node.all_input_nodes for tensor in tensors_of(source))


def behind_views(node: fx.Node) -> fx.Node:
    """The node whose storage a chain of views shows."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def shows(node: fx.Node) -> bool:
    """Whether a node is a view, or one of several that an operator makes at once: a part of `split`."""
    return is_view(node) or (node.target is operator.getitem and is_view(node.all_input_nodes[0]))


def works_in_place(node: fx.Node, differentiated: Any) -> bool:
    """Whether the eager run writes the result of this node over its first argument.

    `differentiated` is the operator whose backward this node is a part of, None in the forward.
    """
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if is_backward(node):
        in_formula = node.target in _IN_PLACE_FORMULAS.get(differentiated, ())
        return in_formula or _accumulates(node) or _scatters_into_zeros(node)
    return mark_of(node).in_place or _adds_bias(node)


def _adds_bias(node: fx.Node) -> bool:
    """Whether `linear` adds its bias here: in place in the eager run, out of place under a trace."""
    if node.target is not torch.ops.aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    product, bias = node.args
    while isinstance(product, fx.Node) and is_view(product):
        product = product.args[0]
    return (
        isinstance(product, fx.Node)
        and product.target in _PRODUCTS
        and isinstance(bias, fx.Node)
        and type(bias.meta.get("desc")).__name__ == "ParamAOTInput"
        and mark_of(product) == mark_of(node)
    )


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default}


# Backward formulas that work in place except under a trace: the operator, and what it does in place.
_IN_PLACE_FORMULAS = {
    torch.ops.aten.binary_cross_entropy_with_logits.default: {torch.ops.aten.mul.Tensor, torch.ops.aten.div.Scalar}
}


def _scatters_into_zeros(node: fx.Node) -> bool:
    """Whether a backward formula writes into zeros it just made: in place, except under a trace."""
    first = node.args[0]
    return (
        getattr(node.target, "overloadpacket", None) in _SCATTERS
        and isinstance(first, fx.Node)
        and getattr(first.target, "overloadpacket", None) in _ZEROS
    )


_SCATTERS = {torch.ops.aten.index_put, torch.ops.aten.scatter_add, torch.ops.aten.index_add, torch.ops.aten.scatter}
_ZEROS = {torch.ops.aten.zeros, torch.ops.aten.new_zeros, torch.ops.aten.zeros_like}


def _accumulates(node: fx.Node) -> bool:
    """Whether autograd adds up two gradients of one value here, into the first one's memory.

    It does so unless the first is a view (seen on torch 2.13: `add_` after an operator that
    made its own result, `add` after `t` or `view`).
    """
    if node.target is not torch.ops.aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    first, second = node.args
    return isinstance(second, fx.Node) and isinstance(first, fx.Node) and not is_view(first)
