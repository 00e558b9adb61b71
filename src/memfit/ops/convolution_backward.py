"""A convolution's backward in two parts: the weight's gradient first, then the input's, sample by sample.

Eager's operator reorders input and gradient for both at once and holds all of it to the end. The weight's
gradient is one sum over all samples and stays one call. The input's gradient of a sample depends on that sample
alone; where it has the shape of the gradient it starts from, it is written over it. A library may choose
another algorithm for one sample than for many, so this is used only where the bits were seen to be the same.
"""

from collections.abc import Iterator
from typing import Any

import torch

from memfit.ops.lean import Alternative, LeanOperator, Site, is_worth_it, pieces, value_of

aten = torch.ops.aten

_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def convolution_backward(
    gradient: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, *others: Any
) -> _Gradients:
    """What `aten.convolution_backward` makes, all of it wanted but perhaps the bias."""
    return _in_two_parts(gradient, values, weight, others, torch.empty_like(values))


def convolution_backward_(
    gradient: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, *others: Any
) -> _Gradients:
    """The same, into a gradient of the input's shape."""
    return _in_two_parts(gradient, values, weight, others, gradient)


def _in_two_parts(
    gradient: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, others: tuple[Any, ...], result: torch.Tensor
) -> _Gradients:
    *settings, wanted = others
    _, of_weight, of_bias = aten.convolution_backward(
        gradient, values, weight, *settings, [False, wanted[1], wanted[2]]
    )
    for sample in pieces(len(values), 1):
        result[sample] = aten.convolution_backward(
            gradient[sample], values[sample], weight, *settings, [True, False, False]
        )[0]
    return result, of_weight, of_bias


def _alternatives(site: Site) -> Iterator[Alternative]:
    if site.node.target is not aten.convolution_backward.default:
        return
    args: Any = site.node.args
    gradient, values = value_of(args[0]), value_of(args[1])
    if gradient is None or values is None or len(values) < 2 or not all(args[-1][:2]):
        return
    in_order = gradient.is_contiguous() and values.is_contiguous()
    if in_order and values.device.type == "cpu" and is_worth_it(values):
        yield Alternative(function=convolution_backward, args=args, of=site.node)


CONVOLUTION_BACKWARD = LeanOperator(
    name="convolution_backward",
    technique="lean",
    keeps="the input's gradient once, without copies of all samples in another order beside it",
    exact=True,
    certain=False,  # libraries choose an algorithm by shape, and one sample is another shape
    functions=(convolution_backward,),
    alternatives=_alternatives,
    in_place={convolution_backward: convolution_backward_},
)
