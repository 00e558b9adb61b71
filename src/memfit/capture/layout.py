"""Images whose channels lie last in memory, for convolutions.

Note [Channels last]
    Libraries of convolutions work on images whose channels are neighbours, and copy others on the way in and out. So
    what a convolution reads is laid out so in the trace, if it is not: one copy before the first, because what
    follows keeps the layout it is given, in the backward pass too. Sums are taken in another order then.
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
            args = tuple(map(_laid_out, args[:1])) + args[1:]
            kwargs = kwargs | {name: _laid_out(kwargs[name]) for name in ("input",) if name in kwargs}
        return function(*args, **kwargs)


def _laid_out(images: torch.Tensor) -> torch.Tensor:
    return images.contiguous(memory_format=torch.channels_last) if images.dim() == 4 else images


_CONVOLUTIONS = {torch.conv2d, torch.conv_transpose2d, F.conv2d, F.conv_transpose2d}
