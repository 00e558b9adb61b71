"""Find linear and cross-entropy in a captured graph and put the chunked operator in their place.

What is looked for: `nll_loss_forward` of `_log_softmax` of something that shows (by views, a cast, a
slice of positions) the result of one `mm` or `addmm`; and the way back to the gradients of hidden
states, weight and bias. If anything else reads a value in between (the logits are an output,
the loss is smoothed or weighted by class), everything stays as it is.
"""

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from memfit.capture.nodes import write_call
from memfit.capture.trace import Joint
from memfit.ops import cross_entropy
from memfit.ops.cross_entropy import gradients_of_linear, loss_of_linear

aten = torch.ops.aten

_REDUCTIONS = (1, 2)  # how torch numbers mean and sum
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default}
_SHOWING = _VIEWS | {aten._to_copy.default, aten.clone.default, aten.slice.Tensor}
_SHOWING_BACK = _VIEWS | {aten._to_copy.default, aten.clone.default, aten.slice_backward.default, aten.t.default}
_LOSS_BACKWARD = {aten.nll_loss_backward.default, aten._log_softmax_backward_data.default}


def rewrite(joint: Joint) -> bool:
    """Replace linear with cross-entropy wherever the logits are many; whether there was one."""
    graph = joint.graph_module.graph
    found = [match for node in graph.nodes if (match := _match(node)) is not None]
    for match in found:
        _replace(graph, match)
    return bool(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Match:
    """The nodes of one linear with cross-entropy."""

    inner: list[fx.Node]  # everything that is not needed any more, in the order of the graph
    product: fx.Node  # mm or addmm
    loss: fx.Node  # nll_loss_forward
    loss_backward: fx.Node  # nll_loss_backward
    positions: tuple[int, int, int] | None  # of a slice: how many there are, the first and the end of those taken
    ends: tuple[fx.Node | None, ...]  # what makes the gradients of hidden states, weight and bias

    @property
    def linear(self) -> tuple[Any, Any, Any]:
        """Hidden states, weight and bias."""
        bias, hidden, transposed = (None, *self.product.args)[-3:]
        return hidden, _behind_t(transposed), bias


def _match(loss: fx.Node) -> _Match | None:
    if loss.target is not aten.nll_loss_forward.default:
        return None
    args: Any = loss.args
    log_softmax, _, class_weights, reduction, _ = args
    if log_softmax.target is not aten._log_softmax.default or class_weights is not None or reduction not in _REDUCTIONS:
        return None
    chain = _shown(log_softmax.args[0])
    slices = [node for node in chain if node.target is aten.slice.Tensor and not _is_whole(node)]
    if not _is_linear(chain[-1]) or len(slices) > 1 or not all(map(_takes_positions, slices)):
        return None
    vocabulary = chain[-1].meta["val"].shape[-1]
    if log_softmax.args[1] not in (1, -1) or any(node.meta["val"].shape[-1] != vocabulary for node in chain):
        return None
    if chain[-1].meta["val"].numel() <= cross_entropy.SLICE:
        return None
    return _with_backward(loss, log_softmax, chain, slices)


def _with_backward(loss: fx.Node, log_softmax: fx.Node, chain: list[fx.Node], slices: list[fx.Node]) -> _Match | None:
    inner, outer = _followed(log_softmax)
    product = chain[-1]
    backward = [node for node in inner if node.target is aten.nll_loss_backward.default]
    ends = [_end(node, product, inner) for node in outer if node is not loss]
    read_elsewhere = any(user not in inner and user not in chain for node in chain for user in node.users)
    if len(backward) != 1 or read_elsewhere or None in ends or len(set(ends)) != len(ends):
        return None
    by_place = dict(zip(ends, (node for node in outer if node is not loss), strict=True))
    gone = {*chain, *inner, *by_place.values(), loss, *loss.users}
    return _Match(
        inner=[node for node in loss.graph.nodes if node in gone],
        product=product,
        loss=loss,
        loss_backward=backward[0],
        positions=_positions(slices[0]) if slices else None,
        ends=tuple(by_place.get(place) for place in range(3)),
    )


def _shown(node: Any) -> list[fx.Node]:
    """The nodes back to the one whose values `node` shows, that one last."""
    chain: list[fx.Node] = [node]
    while chain[-1].target in _SHOWING:
        source: Any = chain[-1].args[0]
        chain.append(source)
    return chain


def _followed(log_softmax: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """What the loss and its gradient pass through, and what reads it from outside."""
    inner, outer = [log_softmax], []
    for node in inner:
        for user in node.users:
            if user.target in _SHOWING_BACK or user.target in _LOSS_BACKWARD:
                inner += [user] if user not in inner else []
            elif user not in outer:
                outer.append(user)
    return inner, outer


def _end(node: fx.Node, product: fx.Node, inner: list[fx.Node]) -> int | None:
    """Which gradient a node makes: 0 of the hidden states, 1 of the weight, 2 of the bias."""
    bias, hidden, transposed = (None, *product.args)[-3:]
    if node.target is aten.mm.default:
        left, right = node.args
        if right is hidden and left in inner:
            return 1
        return 0 if _behind_t(right) is _behind_t(transposed) and left in inner else None
    sums_rows = node.target is aten.sum.dim_IntList and node.args[1:] == ([0], True)
    return 2 if sums_rows and bias is not None else None


def _behind_t(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target in (aten.t.default, aten.detach.default):
        node = node.args[0]
    return node


def _is_linear(product: fx.Node) -> bool:
    """Whether a node multiplies with a transposed weight, and at most adds a bias."""
    if product.target not in (aten.mm.default, aten.addmm.default) or product.kwargs:
        return False
    transposed = product.args[-1]
    return isinstance(transposed, fx.Node) and transposed.target is aten.t.default


def _is_whole(node: fx.Node) -> bool:
    source: Any = node.args[0]
    return bool(node.meta["val"].shape == source.meta["val"].shape)


def _takes_positions(node: fx.Node) -> bool:
    """Whether a slice takes neighbouring positions of every sequence."""
    source: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    return dim in (source.meta["val"].dim() - 2, -2) and len(node.args) < 5


def _positions(node: fx.Node) -> tuple[int, int, int]:
    source: Any = node.args[0]
    args: Any = node.args
    count = source.meta["val"].shape[-2]
    start = args[2] if len(args) > 2 and args[2] is not None else 0
    start = max(0, start + count) if start < 0 else start
    return count, start, start + node.meta["val"].shape[-2]


def _replace(graph: fx.Graph, match: _Match) -> None:
    args: Any = match.loss.args
    _, target, _, reduction, ignore_index = args
    hidden, weight, bias = match.linear
    dtype = match.loss.meta["val"][0].dtype
    with graph.inserting_before(match.loss):
        target = _for_all_positions(graph, match, target, ignore_index)
        forward = write_call(
            graph, match.loss, loss_of_linear, (hidden, weight, bias, target, reduction, ignore_index, dtype)
        )
        loss, number, of_rows = (
            write_call(graph, match.loss, operator.getitem, (forward, place)) for place in range(3)
        )
    wanted = [end is not None for end in match.ends]
    with graph.inserting_before(match.loss_backward):
        given = (match.loss_backward.args[0], hidden, weight, bias, target, number, of_rows)
        backward = write_call(
            graph, match.loss_backward, gradients_of_linear, (*given, reduction, ignore_index, wanted)
        )
        for place, end in enumerate(match.ends):
            if end is not None:
                end.replace_all_uses_with(write_call(graph, match.loss_backward, operator.getitem, (backward, place)))
    for user in list(match.loss.users):
        user.replace_all_uses_with((loss, number)[user.args[1]])  # type: ignore[index]
    for node in reversed(match.inner):
        graph.erase_node(node)


def _for_all_positions(graph: fx.Graph, match: _Match, target: fx.Node, ignore_index: int) -> fx.Node:
    """Targets of all rows: those of positions that the slice leaves out are ignored."""
    if match.positions is None:
        return target
    count, start, end = match.positions
    sequences = match.product.meta["val"].shape[0] // count
    shaped = write_call(graph, match.loss, aten.view.default, (target, [sequences, end - start]))
    padding = [start, count - end]
    padded = write_call(graph, match.loss, aten.constant_pad_nd.default, (shaped, padding, ignore_index))
    return write_call(graph, match.loss, aten.view.default, (padded, [sequences * count]))
