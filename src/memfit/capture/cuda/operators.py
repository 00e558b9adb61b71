"""Let composite operators come apart as they do on CUDA, while a model is traced on a CPU's tensors without memory.

Note [Operators of another device]
    A composite operator asks where its arguments are and calls another one. Here the arguments of a trace are on the
    CPU, so for the thread that traces the question is answered for a CUDA device instead: the operators that CUDA
    picks have derivatives and descriptions of their results like all others, and need no device for a trace. They
    never run. What other threads compute meanwhile is not touched.

From PyTorch's `aten/src/ATen/native/`: `Dropout.cpp` (`is_fused_kernel_acceptable`), `SoftMax.cpp` (`softmax`: 16 bits
to 32 without a copy), `RNN.cpp`, `layer_norm.cpp`; batch norm's are named in `batch_norm.py`.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfit import _torch
from memfit.capture.cuda import batch_norm, grouped
from memfit.capture.cuda.attention import attend
from memfit.capture.cuda.autocast import autocast_by_name, cast_lists
from memfit.capture.cuda.capability import Capability
from memfit.capture.cuda.recurrent import recurrent_operators

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def operators_of(device: Capability | None) -> Iterator[None]:
    """Trace as a device runs it, see Note [Operators of another device]; None: as this one does."""
    if device is None:
        yield
        return
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        here = threading.get_ident()
        for name, function in _composites(device).items():
            library.impl(name, _in_thread(here, name, function), "AutogradCPU", allow_override=True)
        descriptions = _descriptions()
        for name, function in descriptions.items():
            library.impl(name, function, "Meta", allow_override=True)
        stack.enter_context(_torch.described_by_kernels([getattr(aten, name).default for name in descriptions]))
        for name, function in cast_lists(here).items():
            library.impl(name, function, "AutocastCPU", allow_override=True)
        stack.enter_context(autocast_by_name(here))
        yield


def _descriptions() -> dict[str, Callable[..., Any]]:
    """Return what tells the results of operators that torch describes otherwise, or not at all."""
    return {
        "native_batch_norm": batch_norm.described,
        "cudnn_batch_norm": batch_norm.described_of_cudnn,
        "cudnn_batch_norm_backward": batch_norm.described_backward_of_cudnn,
        "_grouped_mm": grouped.described,
        **recurrent_operators().descriptions,
    }


def _composites(device: Capability) -> dict[str, Callable[..., Any]]:
    return {
        "scaled_dot_product_attention": functools.partial(attend, device),
        "batch_norm": batch_norm.batch_norm,
        "dropout": _dropout,
        "softmax.int": functools.partial(_softmax, aten._softmax.default),
        "log_softmax.int": functools.partial(_softmax, aten._log_softmax.default),
        "rms_norm": _rms_norm,
        **recurrent_operators().composites,
    }


def _in_thread(thread: int, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a function to one thread; in others the operator comes apart as ever."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(aten, packet), overload or "default")

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs) if threading.get_ident() == thread else NotImplemented
        return operator.decompose(*args, **kwargs) if result is NotImplemented else result

    return call


def _dropout(values: torch.Tensor, probability: float, train: bool) -> Any:
    """Keep a mask of one byte a value, where the fused kernel runs.

    Nothing is dropped with probability 0: CUDA returns the values themselves. A kernel of Python's may not, torch would
    copy them, so it returns a view.
    """
    if train and 0 < probability < 1 and values.numel():
        return aten.native_dropout(values, probability, train)[0]
    if not train or probability == 0 or not values.numel():
        return values.view_as(values)
    return NotImplemented


def _softmax(kernel: Any, values: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Read 16 bits and write 32 in one kernel, where a CPU copies first."""
    if dtype is torch.float32 and values.dtype in _HALF:
        return kernel(values, dim, True)
    return NotImplemented


def _rms_norm(
    values: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """Keep the input and one number a row, as the fused kernel does.

    That kernel's operator comes apart on a CPU whatever is done, so layer norm stands for it, which keeps the same.
    """
    if weight is not None and weight.dtype != values.dtype:
        return NotImplemented
    eps = torch.finfo(values.dtype).eps if eps is None else eps
    return aten.native_layer_norm(values, normalized_shape, weight, None, eps)[0]
