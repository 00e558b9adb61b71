"""Let the backward pass of a trace start from gradients in the layout in which they will come.

Note [Gradients of outputs]
    A trace takes for granted that the gradient of an output is laid out as the output is. A loss may make another: the
    gradient of `logits.flatten(1)` is contiguous whatever the logits are. Torch then copies what comes before the
    captured backward pass begins, and sums over it add up in another order than the eager run's. So where a loss is
    known, its gradients are looked at, and such an output is traced through a copy of that layout, which its gradient
    passes as it is. The copy itself is taken out of the graph: the output stays what the model made.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

Axes = tuple[int, ...]  # of a dense tensor, from the widest stride to the narrowest
Starts = tuple[Axes | None, ...]  # by output; None: as the output is laid out


def axes_of(tensor: torch.Tensor) -> Axes | None:
    """Axes from the widest stride to the narrowest; None if elements overlap or have gaps between them."""
    strides, shape = tensor.stride(), tensor.shape
    axes = tuple(sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis)))
    step = 1
    for axis in reversed(axes):
        if shape[axis] > 1 and strides[axis] != step:
            return None
        step *= shape[axis]
    return axes


def starting_in(tensor: torch.Tensor, axes: Axes | None) -> torch.Tensor:
    """A tensor as a trace is to return it, so that its gradient comes in this layout."""
    own = axes_of(tensor)
    if axes is None or own is None or len(axes) != tensor.dim() or _lies_in(tensor, axes):
        return tensor
    laid_out: torch.Tensor = _Copy.apply(tensor, axes)
    return laid_out


def _lies_in(tensor: torch.Tensor, axes: Axes) -> bool:
    return tensor.permute(axes).is_contiguous()


class _Copy(torch.autograd.Function):
    """A copy in another layout, whose gradient is that of the original as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axes: Axes) -> torch.Tensor:
        back = [axes.index(axis) for axis in range(len(axes))]
        return tensor.permute(axes).contiguous().permute(back)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


def take_out_copies(graph: fx.Graph, places: Sequence[int]) -> None:
    """Return what was copied in the place of copies, at some places of what a graph returns."""
    output = graph.output_node()
    returned: Any = output.args[0]
    results = list(returned)
    for place in places:
        node = results[place]
        while node.target is torch.ops.aten.permute.default and _is_copied(node):
            node = node.args[0]
        if node.target is torch.ops.aten.clone.default:
            node = node.args[0]
            results[place] = node.args[0] if node.target is torch.ops.aten.permute.default else node
    output.args = (type(returned)(results),)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or _draws(node))


def _is_copied(node: fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, fx.Node) and source.target in (
        torch.ops.aten.clone.default,
        torch.ops.aten.permute.default,
    )


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
