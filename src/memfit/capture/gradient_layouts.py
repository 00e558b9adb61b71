"""Let the backward pass of a trace start from gradients in the layout in which they will come.

Note [Gradients of outputs]
    A trace takes for granted that the gradient of an output is laid out as the output is. A loss may make another: the
    gradient of `logits.flatten(1)` is contiguous whatever the logits are. Torch then copies what comes before the
    captured backward pass begins, and sums over it add up in another order than the eager run's. So where a loss is
    known, its gradients are looked at, and such an output is traced through a copy of that layout, which its gradient
    passes as it is. The copy itself is taken out of the graph: the output stays what the model made. The gradient of a
    sum is one number, expanded; it is copied all the same, and one number of it is expanded again. An output whose
    elements lie over each other (`unfold`) cannot have its gradient laid out so: that is contiguous.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

Axes = tuple[int, ...]  # of a dense tensor, from the widest stride to the narrowest; none: one number, expanded
Starts = tuple[Axes | None, ...]  # by output; None: as the output is laid out


def axes_of(tensor: torch.Tensor) -> Axes | None:
    """Axes from the widest stride to the narrowest; None if some elements overlap or have gaps between them."""
    strides, shape = tensor.stride(), tensor.shape
    if tensor.numel() > 1 and not any(stride for stride, size in zip(strides, shape, strict=True) if size > 1):
        return ()
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
    if _overlaps(tensor):
        contiguous: torch.Tensor = _Copy.apply(tensor, tuple(range(tensor.dim())))
        return contiguous
    if axes is None or not own or len(axes) not in (0, tensor.dim()):
        return tensor
    if axes and tensor.permute(axes).is_contiguous():
        return tensor
    laid_out: torch.Tensor = _Copy.apply(tensor, axes) if axes else _OfOneNumber.apply(tensor)
    return laid_out


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements lie over each other, beside those of expanded axes."""
    lengths = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride and size]
    return 1 + sum((size - 1) * stride for size, stride in lengths) < math.prod(size for size, _ in lengths)


class _Copy(torch.autograd.Function):
    """A copy in another layout, whose gradient is that of the original as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axes: Axes) -> torch.Tensor:
        back = [axes.index(axis) for axis in range(len(axes))]
        return tensor.permute(axes).contiguous().permute(back)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class _OfOneNumber(torch.autograd.Function):
    """A copy whose gradient is one number, expanded."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        first = gradients[0][(0,) * gradients[0].dim()]
        return first.expand(gradients[0].shape)


def take_out_copies(graph: fx.Graph, outputs: Sequence[int]) -> None:
    """Return what was copied in the place of copies, for some outputs of the model."""
    output = graph.output_node()
    returned: Any = output.args[0]
    results = [
        _copied(node) if getattr(description, "idx", None) in outputs and _is_of_model(description) else node
        for node, description in zip(returned, output.meta["desc"], strict=True)
    ]
    output.args = (type(returned)(results),)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or _draws(node))


def _is_of_model(description: Any) -> bool:
    return type(description).__name__ == "PlainAOTOutput"


def _copied(node: fx.Node) -> Any:
    """What a copy was made of; the node itself if it is none."""
    copy: Any = node
    while copy.target is torch.ops.aten.permute.default and _is_copied(copy):
        copy = copy.args[0]
    if copy.target is not torch.ops.aten.clone.default:
        return node
    source = copy.args[0]
    turned = source.target is torch.ops.aten.permute.default and "memory_format" in copy.kwargs
    return source.args[0] if turned else source


def _is_copied(node: fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, fx.Node) and source.target in (
        torch.ops.aten.clone.default,
        torch.ops.aten.permute.default,
    )


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
