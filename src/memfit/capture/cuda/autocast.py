"""CUDA's cast lists under autocast, for a trace on a CPU's tensors.

From PyTorch's `aten/src/ATen/autocast_mode.h` (`AT_FORALL_FP32`, `AT_FORALL_FP32_SET_OPT_DTYPE`,
`AT_FORALL_PROMOTE`, `AT_FORALL_LOWER_PRECISION_FP`) and `autocast_mode.cpp`, where CPU and CUDA have lists of their
own: on a CPU softmax, norms and most losses stay in 16 bits. What both cast alike (matrix products, convolutions) is
left to torch. What only a CPU casts (`cross_entropy_loss`) goes on as if there were no autocast for it, while what it
calls may still be cast; torch tells which these are.

Note [Autocast by name]
    Code that is written for a GPU asks for `torch.autocast("cuda")`, which torch refuses with a warning where there is
    none, and which leaves a CPU's tensors alone. In a trace for a CUDA device it is the CPU's autocast, with CUDA's
    type. What is made before the trace (an object in a variable, a `with` around the call) has been refused already.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memfit import _torch
from memfit.tensors import tensors_in

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
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
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
_TO_16_BITS = ("addmv", "addr", "mv", "chain_matmul", "linalg_multi_dot")  # which a CPU leaves
_TO_THE_WIDEST = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
)
_CAST_WITHIN = ("aten::conv", "aten::_addmm_activation", "aten::mkldnn_rnn_layer")  # CUDA casts what they call


def cast_lists(thread: int) -> dict[str, Callable[..., Any]]:
    """Return, by the names of operators, what autocast does with them on CUDA; for one thread alone."""
    changes = [
        (_IN_32_BITS, _in_32_bits),
        (_RESULT_IN_32_BITS, _result_in_32_bits),
        (_TO_16_BITS, _to_16_bits),
        (_TO_THE_WIDEST, _to_the_widest),
    ]
    cast = {
        name: _calling(operator, change, thread)
        for names, change in changes
        for name in names
        if (operator := _operator(name)) is not None
    }
    left = {name: _passing(operator) for name in _cast_by_cpus_alone() if (operator := _operator(name)) is not None}
    return left | cast


@contextlib.contextmanager
def autocast_by_name(thread: int) -> Iterator[None]:
    """Let one thread have autocast for "cuda" on a CPU's tensors, see Note [Autocast by name]."""
    kind, is_enabled, dtype_of = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype
    initialize = kind.__init__

    def here(device: str | None) -> bool:
        return threading.get_ident() == thread and device in (None, "cuda")

    def begin(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if here(device_type):
            device_type, dtype = "cpu", dtype or dtype_of("cuda")
        initialize(self, device_type, dtype, *args, **kwargs)

    def enabled(device: str | None = None) -> bool:
        return is_enabled("cpu" if here(device) else device or "cuda")

    def dtype(device: str) -> torch.dtype:
        return dtype_of("cpu" if here(device) and is_enabled("cpu") else device)

    with (
        _replaced(kind, "__init__", begin),
        _replaced(torch, "is_autocast_enabled", enabled),
        _replaced(torch, "get_autocast_dtype", dtype),
        _replaced(torch, "get_autocast_gpu_dtype", lambda: dtype("cuda")),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    was = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, was)


def _cast_by_cpus_alone() -> list[str]:
    names = _torch.operators_of_key("AutocastCPU") - _torch.operators_of_key("AutocastCUDA")
    return sorted(name.removeprefix("aten::") for name in names if not name.startswith(_CAST_WITHIN))


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


def _passing(operator: Any) -> Callable[..., Any]:
    """Go on below autocast, which stays on for what the operator calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if operator._can_decompose():
            return operator.decompose(*args, **kwargs)
        with _without_autocast():
            return operator(*args, **kwargs)

    return call


def _calling(operator: Any, change: Callable[..., tuple[Any, Any]], thread: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            args, kwargs = change(operator, args, kwargs)
        with _without_autocast():
            return operator(*args, **kwargs)

    return call


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        yield


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


def _to_16_bits(_operator: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return pytree.tree_map_only(torch.Tensor, _half, (args, kwargs))  # type: ignore[no-any-return]


def _to_the_widest(_operator: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtypes = {each.dtype for each in tensors_in((args, kwargs)) if each.is_floating_point()}
    return (args, kwargs) if dtypes <= {*_HALF} else _in_32_bits(_operator, args, kwargs)


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.get_autocast_dtype("cpu")) if tensor.is_floating_point() else tensor
