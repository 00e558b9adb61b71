"""CUDA's cast lists under autocast, for a trace on a CPU's tensors.

From PyTorch's `aten/src/ATen/autocast_mode.h` (`AT_FORALL_FP32`, `AT_FORALL_FP32_SET_OPT_DTYPE`) and
`autocast_mode.cpp`, where CPU and CUDA have lists of their own: on a CPU softmax, norms and most losses stay in 16
bits. What both cast alike (matrix products, convolutions) is left to torch.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)

_IN_32_BITS = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "softplus",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "frobenius_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "upsample_bilinear2d.vec",
    "upsample_nearest2d.vec",
    "rms_norm",
)
_RESULT_IN_32_BITS = (  # told by their argument `dtype`, where none is given
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "sum",
    "sum.dim_IntList",
)
_AS_GIVEN = (  # a CPU casts these to 32 bits, CUDA leaves them
    "avg_pool3d",
    "reflection_pad1d",
    "reflection_pad2d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "adaptive_avg_pool3d",
    "grid_sampler",
    "fft_fft",
)


def cast_lists(thread: int) -> dict[str, Callable[..., Any]]:
    """Return, by the names of operators, what autocast does with them on CUDA; for one thread alone."""
    changes = [(_IN_32_BITS, _in_32_bits), (_RESULT_IN_32_BITS, _result_in_32_bits), (_AS_GIVEN, None)]
    return {
        name: _calling(operator, change, thread)
        for names, change in changes
        for name in names
        if (operator := _operator(name)) is not None
    }


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


def _calling(operator: Any, change: Callable[..., tuple[Any, Any]] | None, thread: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if change is not None and threading.get_ident() == thread:
            args, kwargs = change(operator, args, kwargs)
        with torch.autocast("cpu", enabled=False), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(*args, **kwargs)

    return call


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _in_32_bits(_operator: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return pytree.tree_map_only(torch.Tensor, _float, (args, kwargs))  # type: ignore[no-any-return]


def _result_in_32_bits(operator: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Ask for a result in 32 bits, unless another was asked for: kernels then read 16 bits and copy nothing."""
    if args[0].dtype not in _HALF:
        return args, kwargs
    arguments = [each.name for each in operator._schema.arguments]
    place = arguments.index("dtype")
    if kwargs.get("dtype") is not None or (len(args) > place and args[place] is not None):
        return args, kwargs
    if len(args) > place:
        return (*args[:place], torch.float32, *args[place + 1 :]), kwargs
    return args, kwargs | {"dtype": torch.float32}


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
