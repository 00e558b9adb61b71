"""A convolution's backward a few samples at a time.

Eager's operator reorders the whole input and the whole gradient, and holds both beside what it makes. A few samples at
a time it needs an eighth of that, and where the input's gradient has the shape of the gradient it starts from, it is
written over it. The weight's gradient becomes a sum of sums, which rounds differently: so this goes with compiled
kernels, which do so anyway. `convolution_backward.py` is the form that keeps the bits.
"""

from collections.abc import Iterator
from typing import Any

import torch

from memfit.ops.lean import Alternative, LeanOperator, Site, is_dense, is_worth_it, pieces, same_layout, value_of

aten = torch.ops.aten

_PIECES = 8
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def backward_by_samples(gradient: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, *others: Any) -> _Gradients:
    """What `aten.convolution_backward` makes, all of it wanted but perhaps the bias."""
    return _summed(gradient, values, weight, others, torch.empty_like(values))


def backward_by_samples_(
    gradient: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, *others: Any
) -> _Gradients:
    """The same, into a gradient of the input's shape."""
    return _summed(gradient, values, weight, others, gradient)


def _summed(
    gradient: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, others: tuple[Any, ...], result: torch.Tensor
) -> _Gradients:
    *settings, wanted = others
    exact = torch.promote_types(weight.dtype, torch.float32)  # sums of parts in 16 bits would be rounded at each
    of_weight = torch.zeros_like(weight, dtype=exact)
    of_bias = gradient.new_zeros(gradient.shape[1], dtype=exact) if wanted[2] else None
    for some in pieces(len(values), -(-len(values) // _PIECES)):
        made, weight_part, bias_part = aten.convolution_backward(
            gradient[some], values[some], weight, *settings, wanted
        )
        result[some] = made
        of_weight += weight_part
        if of_bias is not None:
            of_bias += bias_part
    return result, of_weight.to(weight.dtype), None if of_bias is None else of_bias.to(weight.dtype)


def _alternatives(site: Site) -> Iterator[Alternative]:
    if site.node.target is not aten.convolution_backward.default:
        return
    args: Any = site.node.args
    gradient, values, weight = (value_of(each) for each in args[:3])
    if gradient is None or values is None or weight is None or len(values) < 2 or not all(args[-1][:2]):
        return
    made: Any = site.node.meta["val"]
    as_it_makes_them = same_layout(values, made[0]) and same_layout(weight, made[1])
    if as_it_makes_them and _samples_lie_apart(gradient, values) and values.is_cpu and is_worth_it(values):
        yield Alternative(function=backward_by_samples, args=args, of=site.node)


def _samples_lie_apart(*tensors: torch.Tensor) -> bool:
    return all(is_dense(each) and each.stride(0) == max(each.stride()) for each in tensors)


CONVOLUTION_BY_SAMPLES = LeanOperator(
    name="convolution_by_samples",
    technique="inductor",
    keeps="nothing of other samples while a convolution's gradients are computed, the input's written over its own",
    exact=False,
    functions=(backward_by_samples,),
    alternatives=_alternatives,
    in_place={backward_by_samples: backward_by_samples_},
)
