"""BatchNorm's backward a few channels at a time, into the gradient it starts from.

Every channel is by itself, and the kernel treats a few contiguous channels as it treats all: the bits are the
same. Eager makes a new gradient beside the old one and the input; here only a few channels are there twice,
and memory that was just written is in the cache when it is read.
"""

from collections.abc import Iterator
from typing import Any

import torch

from memfit.ops.lean import Alternative, LeanOperator, Site, is_worth_it, pieces, same_layout, value_of

aten = torch.ops.aten

_SLICE_BYTES = 2**20
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batch_norm_backward(gradient: torch.Tensor, values: torch.Tensor, *others: Any) -> _Gradients:
    """What `aten.native_batch_norm_backward` makes in training mode."""
    return batch_norm_backward_(gradient.clone(), values, *others)


def batch_norm_backward_(
    gradient: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    training: bool,
    epsilon: float,
    wanted: list[bool],
) -> _Gradients:
    """The same, into the gradient."""
    of_weight, of_bias = torch.empty_like(weight), torch.empty_like(weight)
    by_channel = (weight, running_mean, running_variance, mean, inverse_deviation)
    for channels in _slices(values):
        made = aten.native_batch_norm_backward(
            gradient[:, channels].contiguous(),
            values[:, channels].contiguous(),
            *(None if each is None else each[channels] for each in by_channel),
            training,
            epsilon,
            wanted,
        )
        gradient[:, channels], of_weight[channels], of_bias[channels] = made
    return gradient, of_weight, of_bias


def _slices(values: torch.Tensor) -> Iterator[slice]:
    count = values.shape[1]
    length = max(1, _SLICE_BYTES * count // (values.numel() * values.element_size()))
    return pieces(count, length)


def _alternatives(site: Site) -> Iterator[Alternative]:
    if site.node.target is not aten.native_batch_norm_backward.default:
        return
    args: Any = site.node.args
    gradient, values, weight = value_of(args[0]), value_of(args[1]), value_of(args[2])
    if gradient is None or values is None or weight is None or not args[7] or not all(args[9]):
        return
    in_order = gradient.is_contiguous() and values.is_contiguous() and same_layout(gradient, values)
    has_places = values.dim() > 2 and values.shape[2:].numel() > 1  # else all channels are summed at once
    if in_order and has_places and values.device.type == "cpu" and is_worth_it(values):
        yield Alternative(function=batch_norm_backward, args=args, of=site.node)


BATCH_NORM_BACKWARD = LeanOperator(
    name="batch_norm_backward",
    technique="lean",
    keeps="nothing beside the gradient it overwrites and the input",
    exact=True,
    functions=(batch_norm_backward,),
    alternatives=_alternatives,
    in_place={batch_norm_backward: batch_norm_backward_},
)
