"""Layouts, lengths and dtypes that every lean operator has to get right."""

import torch

from memfit.ops import bits

LENGTHS = [0, 1, 7, 8, 9, 63, 64, 1000, bits.PIECE, bits.PIECE + 3]
HALF = [torch.float32, torch.bfloat16, torch.float16]

LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "channels-last": lambda tensor: tensor.to(memory_format=torch.channels_last),
    "transposed": lambda tensor: tensor.transpose(1, 3).contiguous().transpose(1, 3),
}


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal to the last bit: -0.0 is not 0.0, and NaN is NaN."""
    assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    assert torch.equal(_integers(one), _integers(other))


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    canonical = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return canonical.contiguous().view(sizes[tensor.element_size()])


def with_special_values(tensor: torch.Tensor) -> torch.Tensor:
    """The same with both zeros, infinities, NaN and denormals among its values."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-40, -1e-40, 1e-7, -1e-7])
    flat = tensor.as_strided((tensor.numel(),), (1,))
    count = min(len(special), flat.numel())
    flat[:count] = special[:count].to(tensor.dtype)
    return tensor
