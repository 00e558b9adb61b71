"""What devices of one compute capability run: which kernels of attention, and how their arguments must lie.

From PyTorch's `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (2.10 to 2.12): `check_prefer_cudnn_attention`,
`check_flash_attention_hardware_support`, `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`,
`minimum_gemm_alignment`, `check_cudnn_tensor_shapes`.
"""

import dataclasses

from memfit.errors import InvalidInput

Version = tuple[int, int]  # major and minor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """The choices that depend on the compute capability of a device."""

    version: Version
    runs_flash: bool  # flash attention, which is for 16 bits alone
    runs_bfloat16: bool  # memory-efficient attention in bfloat16
    prefers_cudnn: bool  # cuDNN's attention is asked first
    flash_lacks_wide_heads: bool  # no training with heads of 193 to 224, nor of more with dropout
    aligned_float32: int  # heads of memory-efficient attention are multiples of this many values
    aligned_half: int
    widest_cudnn_head: int


def _capability(major: int, minor: int, *, flash: bool, cudnn: bool = False, narrow: bool = False) -> Capability:
    return Capability(
        version=(major, minor),
        runs_flash=flash,
        runs_bfloat16=major >= 8,
        prefers_cudnn=cudnn,
        flash_lacks_wide_heads=narrow,
        aligned_float32=4 if major >= 8 else 1,
        aligned_half=8 if major >= 7 else 1,
        widest_cudnn_head=256 if (major, minor) == (9, 0) else 128,
    )


CAPABILITIES = (
    _capability(6, 0, flash=False),
    _capability(6, 1, flash=False),
    _capability(7, 0, flash=False),
    _capability(7, 5, flash=False),
    _capability(8, 0, flash=True),
    _capability(8, 6, flash=True, narrow=True),
    _capability(8, 9, flash=True, narrow=True),
    _capability(9, 0, flash=True, cudnn=True),
    _capability(10, 0, flash=True, cudnn=True),
    _capability(12, 0, flash=True, narrow=True),
)


def find_capability(version: Version) -> Capability:
    """Return what devices of a version run.

    >>> find_capability((7, 5)).runs_flash
    False
    """
    for each in CAPABILITIES:
        if each.version == version:
            return each
    known = ", ".join(f"{major}.{minor}" for major, minor in (each.version for each in CAPABILITIES))
    raise InvalidInput(f"compute capability {version[0]}.{version[1]} is not known; known are {known}")
