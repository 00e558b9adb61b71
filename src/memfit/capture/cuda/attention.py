"""Choose the kernel of scaled-dot-product attention as CUDA does, and call its operator.

The order and the conditions are those of `select_sdp_backend` in PyTorch's
`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`; what is done around the kernels is that of
`scaled_dot_product_attention` in `transformers/attention.cpp`. Settings of the user (`sdpa_kernel`) are obeyed.
"""

import math
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F

from memfit.capture.cuda.capability import Capability

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_WIDEST_FLASH_HEAD = 256
_NARROW_HEADS, _WIDE_HEADS = 192, 224  # between them, and above with dropout, some devices have no backward pass
_HEAD_ALIGNMENT = 8  # values: flash attention pads heads to it
_MASK_ALIGNMENT = 16  # values: memory-efficient attention pads rows of masks to it


class Kernel(StrEnum):
    """The kernels of attention that CUDA has."""

    FLASH = "flash"
    EFFICIENT = "memory-efficient"
    CUDNN = "cuDNN"
    MATH = "math"


def choose_kernel(
    device: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
) -> Kernel:
    """Return the kernel that a device runs on these arguments."""
    order = [Kernel.FLASH, Kernel.EFFICIENT]
    order.insert(0 if device.prefers_cudnn else 2, Kernel.CUDNN)
    if not device.prefers_cudnn:
        order.remove(Kernel.CUDNN)  # it stands behind math then, which always can
    if query.dim() != 4 or not _have_values(query, key, value):
        return Kernel.MATH
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    can_run = {
        Kernel.FLASH: lambda: (
            torch.backends.cuda.flash_sdp_enabled()
            and mask is None
            and _heads_match(query, key, value, enable_gqa)
            and _can_be_flash(device, query, key, value, dropout, is_causal, trains)
        ),
        Kernel.EFFICIENT: lambda: (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and _heads_match(query, key, value, False)
            and _can_be_efficient(device, query, key, value)
        ),
        Kernel.CUDNN: lambda: (
            torch.backends.cuda.cudnn_sdp_enabled()
            and not _is_trained(mask)  # torch has no gradient of it for masks
            and _heads_match(query, key, value, enable_gqa)
            and _can_be_cudnn(device, query, key, value, dropout)
        ),
    }
    return next((kernel for kernel in order if can_run[kernel]()), Kernel.MATH)


def attend(
    device: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call the operator that stands for `scaled_dot_product_attention` on a device."""
    kernel = choose_kernel(device, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    mask = _additive(attn_mask, query.dtype)
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    result: Any
    if kernel is Kernel.FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if kernel is Kernel.EFFICIENT:
        mask = _padded_mask(mask, query, key)
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, trains, dropout_p, is_causal, scale=scale
        )
    elif kernel is Kernel.CUDNN:
        result = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, trains, dropout_p, is_causal, False, scale=scale
        )
    else:
        result = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    attended: torch.Tensor = result[0]
    return attended


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    width = query.size(-1)
    missing = -width % _HEAD_ALIGNMENT
    if missing:
        scale = 1 / math.sqrt(width) if scale is None else scale
        query, key, value = (F.pad(each, (0, missing)) for each in (query, key, value))
    result: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, is_causal, False, scale=scale
    )[0]
    return result[..., :width] if missing else result


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Write a mask of truths as one that is added, as every kernel is given it."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _padded_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    length = mask.size(-1)
    missing = -length % _MASK_ALIGNMENT
    if missing:
        mask = F.pad(mask, (0, missing))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def _is_trained(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def _have_values(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    tensors = (query, key, value)
    is_dense = all(each.dim() == 4 and each.size(2) > 0 for each in tensors)
    return is_dense and all(each.stride(-1) == 1 or each.size(-1) == 1 for each in tensors)


def _heads_match(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> bool:
    same_batch = query.size(0) == key.size(0) == value.size(0)
    heads = [each.size(1) for each in (query, key, value)]
    grouped = enable_gqa and heads[1] == heads[2] and heads[0] % heads[1] == 0
    return same_batch and (len({*heads}) == 1 or grouped)


def _can_be_flash(
    device: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    is_causal: bool,
    trains: bool,
) -> bool:
    width = query.size(-1)
    if not device.runs_flash or query.dtype not in _HALF:
        return False
    if not width == key.size(-1) == value.size(-1) or width > _WIDEST_FLASH_HEAD:
        return False
    if is_causal and query.size(2) != key.size(2):
        return False
    lacks = _NARROW_HEADS < width <= _WIDE_HEADS or (width > _WIDE_HEADS and dropout > 0)
    return not (trains and device.flash_lacks_wide_heads and lacks)


def _can_be_efficient(device: Capability, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    if query.dtype not in (torch.float32, torch.float16) and not (
        device.runs_bfloat16 and query.dtype is torch.bfloat16
    ):
        return False
    alignment = device.aligned_half if query.dtype in _HALF else device.aligned_float32
    return query.size(-1) == key.size(-1) and not query.size(-1) % alignment and not value.size(-1) % alignment


def _can_be_cudnn(
    device: Capability, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
) -> bool:
    if query.dtype not in _HALF or key.size(2) == 1 or (query.size(2) == 1 and dropout):
        return False
    widths = (query.size(-1), value.size(-1))
    return max(widths) <= device.widest_cudnn_head and not any(width % 8 for width in widths)
