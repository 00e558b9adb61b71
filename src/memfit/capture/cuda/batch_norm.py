"""Batch norm as a CUDA device runs it: by cuDNN where that can, by torch's own kernel elsewhere.

From PyTorch's `aten/src/ATen/native/Normalization.cpp` (`_batch_norm_impl_index`) and `cudnn/BatchNorm.cpp`.
"""

from typing import Any

import torch

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions
_MOST_CUDNN_ROWS = 880801  # of a batch norm, `MAX_CUDNN_BATCH` and its kind: above, torch's own kernel runs


def batch_norm(
    images: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Call cuDNN where it can, torch's own kernel elsewhere."""
    is_for_cudnn = (
        cudnn_enabled
        and weight is not None
        and bias is not None
        and (mean is None) == (variance is None)
        and (images.dtype not in _HALF or weight.dtype is torch.float32)
        and images.dtype is not torch.bfloat16
        and (images.dim() != 2 or images.size(0) <= 131070)
        and images.size(0) <= _MOST_CUDNN_ROWS
        and not (not training and mean is None)
    )
    if is_for_cudnn and training:
        return aten.cudnn_batch_norm(images, weight, bias, mean, variance, training, momentum, eps)[0]
    return aten.native_batch_norm(images, weight, bias, mean, variance, training, momentum, eps)[0]


def described(*args: Any) -> Any:
    """Describe what torch's own kernel makes: statistics of 16 bits are in 32, where a CPU's are in 16."""
    images, training = args[0], args[5]
    dtype = torch.float32 if images.dtype in _HALF else images.dtype
    statistics = images.new_empty(images.size(1) if training else 0, dtype=dtype)
    return _like(images), statistics, torch.empty_like(statistics)


def described_of_cudnn(*args: Any) -> Any:
    """Describe what `cudnn_batch_norm` makes: statistics are in the type of the weight, whatever the images are in."""
    images, weight = args[0], args[1]
    return _like(images), torch.empty_like(weight), torch.empty_like(weight), images.new_empty(0, dtype=torch.uint8)


def described_backward_of_cudnn(*args: Any) -> Any:
    """Describe the gradients of images, weight and bias."""
    images, weight = args[0], args[2]
    return _like(images), torch.empty_like(weight), torch.empty_like(weight)


def _like(images: torch.Tensor) -> torch.Tensor:
    """Return results laid out as the images are: channels last where they are that and nothing else."""
    last = _CHANNELS_LAST.get(images.dim())
    is_last = last is not None and images.is_contiguous(memory_format=last) and not images.is_contiguous()
    return torch.empty_like(images, memory_format=last if is_last else torch.contiguous_format)
