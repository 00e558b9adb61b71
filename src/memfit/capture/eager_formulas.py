"""Formulas of backward passes as eager computes them, in a step that runs on fake tensors.

Note [Formulas that look for zeros]
    What differentiates a product divides by its factors, unless one of them is 0. On tensors of a subclass, as fake
    ones are, torch does not look, and computes a longer formula for all cases. A step that is run to see what eager
    takes computes what eager does where no factor is 0, as it is for batches of real numbers.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CUMULATIVE = (torch.cumprod, torch.Tensor.cumprod)


class EagerFormulas(TorchFunctionMode):
    """Differentiates what it knows as eager does, see Note [Formulas that look for zeros]."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CUMULATIVE and _is_plain(args, kwargs):
            return _CumulativeProduct.apply(args[0], args[1] if len(args) > 1 else kwargs["dim"])
        return func(*args, **kwargs)


def _is_plain(args: Any, kwargs: Any) -> bool:
    """Return whether a product of real numbers is differentiated, along one axis, in its own precision."""
    tensor = args[0] if args else None
    if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad or len(args) + len(kwargs) != 2:
        return False
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    return isinstance(axis, int) and tensor.is_floating_point() and tensor.dim() > 0 and tensor.shape[axis] > 1


class _CumulativeProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        result = torch.ops.aten.cumprod.default(tensor, axis)
        ctx.save_for_backward(tensor, result)
        ctx.axis = axis
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tensor, result = ctx.saved_tensors
        weighted = result * gradient
        zeros = tensor == 0
        zeros.any()
        turned = weighted.flip(ctx.axis)
        added = turned.cumsum(ctx.axis)
        total = added.flip(ctx.axis)
        return total.div_(tensor), None
