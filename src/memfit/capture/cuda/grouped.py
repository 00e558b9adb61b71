"""Products of groups of rows, as mixtures of experts have them: CUDA computes them in every type.

Torch's own description takes 16 bits alone, as its fastest kernel does. From PyTorch's
`aten/src/ATen/native/cuda/GroupedBlas.cpp` and `native/GroupedMMUtils.h` (`create_grouped_gemm_output_tensor`).
"""

import torch

_ALIGNED_BYTES = 16  # that each row of a result starts at a multiple of


def described(
    rows: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor | None = None,
    _bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Describe what `_grouped_mm` makes: groups are of rows, of columns, or of what is summed over."""
    dtype = out_dtype or rows.dtype
    height, width = rows.size(-2), weights.size(-1)
    groups = [each.size(0) for each in (rows, weights) if each.dim() == 3]
    if not groups and offsets is not None:
        groups = [offsets.size(0)]
    is_grouped = len(groups) == 2 or (rows.dim() == weights.dim() == 2)
    sizes = (groups[0], height, width) if is_grouped and groups else (height, width)
    step = max(1, _ALIGNED_BYTES // dtype.itemsize)
    stride = -(-width // step) * step
    strides = (height * stride, stride, 1) if len(sizes) == 3 else (stride, 1)
    return rows.new_empty_strided(sizes, strides, dtype=dtype)
