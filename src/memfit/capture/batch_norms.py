"""The results of batch norms in a trace, told at once.

Note [Batch norms at once]
    A trace learns what an operator makes from torch's description of it. That of a batch norm, and that of its backward
    formula, is a computation of some forty operators, which a trace runs one by one without memory: a fifth of its time
    for a network with a hundred batch norms of different sizes. For 32-bit tensors in order, in training, the results
    are known without: one like the images, and vectors with a number a channel. All else goes torch's way.
"""

from collections.abc import Iterator
from typing import Any

import torch

from memfit import _torch

aten = torch.ops.aten

_FORWARD = aten._native_batch_norm_legit_functional.default
_BACKWARD = aten.native_batch_norm_backward.default
_TRAINING = {_FORWARD: 5, _BACKWARD: 7}  # place among the arguments
_ARGUMENTS = {_FORWARD: 8, _BACKWARD: 10}


def made_at_once(mode: _torch.FakeTensorMode, operator: Any, args: Any, kwargs: Any) -> Any | None:
    """Return what a batch norm makes, see Note [Batch norms at once]; None if torch is to say it."""
    if operator not in _TRAINING or kwargs or len(args) != _ARGUMENTS[operator] or not args[_TRAINING[operator]]:
        return None
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    images = args[0] if operator is _FORWARD else args[1]
    if not all(map(_is_plain, tensors)) or images.dim() < 2 or args[0].shape != images.shape or not images.numel():
        return None
    with mode:
        return tuple(_results(operator, args, images))


def _is_plain(tensor: torch.Tensor) -> bool:
    is_known = isinstance(tensor, _torch.FakeTensor) and tensor.device.type == "cpu"
    return is_known and tensor.dtype is torch.float32 and tensor.is_contiguous()


def _results(operator: Any, args: Any, images: torch.Tensor) -> Iterator[torch.Tensor | None]:
    channels = images.shape[1]
    like: dict[str, Any] = {"dtype": images.dtype, "device": images.device}
    yield torch.empty(images.shape, **like)
    if operator is _BACKWARD:
        _, for_weight, for_bias = args[-1]
        wanted = [for_weight, for_bias]
    else:
        running = args[3:5]
        wanted = [True, True, *(each is not None for each in running)]
    for each in wanted:
        yield torch.empty(channels, **like) if each else None
