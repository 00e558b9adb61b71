"""Images whose channels lie last in memory, for convolutions.

Note [Channels last]
    Libraries of convolutions work on images whose channels are neighbours, and copy others on the way in and out. So
    what a convolution reads is laid out so in the trace, if it is not: one copy before the first, because what
    follows keeps the layout it is given, in the backward pass too. Sums are taken in another order then.

Note [Gradients of weights]
    They come in the layout of the images, and autograd would copy each into that of its weight, unseen. So the copy is
    part of the trace, where it is counted and timed.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class ChannelsLast(TorchFunctionMode):
    """While it is on, convolutions of images read them with their channels last."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _CONVOLUTIONS:
            args = tuple(change(each) for change, each in zip((_laid_out, _as_it_lies), args, strict=False)) + args[2:]
            changes = {"input": _laid_out, "weight": _as_it_lies}
            kwargs = {name: changes[name](each) if name in changes else each for name, each in kwargs.items()}
        return function(*args, **kwargs)


def lies_channels_last(value: Any) -> bool:
    """Whether a value is images whose channels lie last and nowhere else."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 4
        and value.is_contiguous(memory_format=torch.channels_last)
        and not value.is_contiguous()
    )


def _laid_out(images: torch.Tensor) -> torch.Tensor:
    return images.contiguous(memory_format=torch.channels_last) if images.dim() == 4 else images


def _as_it_lies(weight: torch.Tensor) -> torch.Tensor:
    return _GradientAsWeight.apply(weight) if weight.requires_grad and weight.is_contiguous() else weight


class _GradientAsWeight(torch.autograd.Function):
    """See Note [Gradients of weights]."""

    @staticmethod
    def forward(_ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()


_CONVOLUTIONS = {torch.conv2d, torch.conv_transpose2d, F.conv2d, F.conv_transpose2d}
