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
_PRODUCTS = (torch.prod, torch.Tensor.prod)


class EagerFormulas(TorchFunctionMode):
    """Differentiates what it knows as eager does, see Note [Formulas that look for zeros]."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CUMULATIVE or func in _PRODUCTS:
            tensor, axis, keeps, others = _taken(*args, **(kwargs or {}))
            if _is_differentiated(tensor) and not others:
                if func in _PRODUCTS:
                    return _Product.apply(tensor, axis, keeps)
                if axis is not None and tensor.shape[axis] > 1:
                    return _CumulativeProduct.apply(tensor, axis)
        return func(*args, **(kwargs or {}))


def _taken(
    input: Any, dim: int | None = None, keepdim: bool = False, **others: Any
) -> tuple[Any, int | None, bool, Any]:  # named as torch does
    """Take the arguments of a product apart: of what, along which axis, whether that is kept, and others."""
    return input, dim, keepdim, others


def _is_differentiated(tensor: Any) -> bool:
    """Return whether a tensor is of real numbers that get a gradient, and that autocast does not cast first."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dim() == 0:
        return False
    is_cast = tensor.itemsize < torch.float32.itemsize and torch.is_autocast_enabled(tensor.device.type)
    return tensor.requires_grad and torch.is_grad_enabled() and not is_cast


class _CumulativeProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten.cumprod.default(tensor, axis)
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


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: int | None, keeps: bool) -> torch.Tensor:
        result: torch.Tensor
        if axis is None:
            result = torch.ops.aten.prod.default(tensor)
        else:
            result = torch.ops.aten.prod.dim_int(tensor, axis, keeps)
        ctx.save_for_backward(tensor, result)
        ctx.axis = None if keeps else axis
        ctx.is_along_one = axis is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tensor, result = ctx.saved_tensors
        if ctx.axis is not None:
            gradient, result = gradient.unsqueeze(ctx.axis), result.unsqueeze(ctx.axis)
        zeros = tensor == 0
        if not ctx.is_along_one:
            del zeros  # of which eager keeps the places alone: none
        return gradient * (result / tensor), None, None
