"""Bytes that CUDA's libraries take beside the tensors of a step: exact where a rule is known, else a range.

Sources: cuBLAS workspaces, `aten/src/ATen/cuda/CublasHandlePool.cpp`; temporaries of attention, flash attention's
`flash_api.cpp` (`mha_bwd`) and `transformers/cuda/attention_backward.cu`. cuDNN does not publish the workspaces of its
convolutions: the upper end is the largest share of input and output that a published peak shows (VGG-16, batch 128,
on an RTX 4090), the lower end is none, which is what published peaks of ResNet-50 show.
"""

import dataclasses
import json
import math
from collections.abc import Mapping

from memfit.ir import Graph, Operation

_MIB = 2**20
_SMALL_CUBLAS_BYTES = 8_519_680  # `:4096:2:16:8`
_BIG_CUBLAS_BYTES = 32 * _MIB
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.addmv.", "aten.mv.")
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_ROWS_OF_FLASH = 128  # sequences are rounded up to it
_ROWS_OF_EFFICIENT = 64
_ACCUMULATED_BYTES = 4  # attention adds up in 32 bits
_CONVOLUTION_SHARE = 3.65  # of input and output, in 32 bits, kernels of more than one element
_FEW_CHANNELS = 16  # of images: below, published peaks show none of the algorithms that transform all of them
_COPIED_SHARE = 1.0  # elsewhere at most a copy of input and output in another layout, as tensor cores want them

CONVOLUTION_REASON = "the algorithms that cuDNN chooses for convolutions, whose workspaces it does not publish"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LibraryBytes:
    """What libraries take on a device, by operation and for good."""

    lowest: tuple[int, ...]  # workspaces by operation
    highest: tuple[int, ...]
    handles: Mapping[int, int]  # cuBLAS workspaces, by the operation that is first to need one in its thread


def library_bytes(graph: Graph, capability: tuple[int, int]) -> LibraryBytes:
    """Find what the operations of a graph take on a device of this compute capability."""
    ranges = [_workspace(graph, operation) for operation in graph.operations]
    products = [place for place, each in enumerate(graph.operations) if each.target.startswith(_PRODUCTS)]
    firsts = {graph.operations[place].phase: place for place in reversed(products)}  # each pass has its own thread
    return LibraryBytes(
        lowest=tuple(low for low, _ in ranges),
        highest=tuple(high for _, high in ranges),
        handles=dict.fromkeys(sorted(firsts.values()), cublas_bytes(capability)),
    )


def cublas_bytes(capability: tuple[int, int]) -> int:
    """Return what cuBLAS takes for each thread that multiplies, once and for good.

    >>> cublas_bytes((8, 6)), cublas_bytes((9, 0))
    (8519680, 33554432)
    """
    return _BIG_CUBLAS_BYTES if capability[0] in (9, 10, 12) else _SMALL_CUBLAS_BYTES


def _workspace(graph: Graph, operation: Operation) -> tuple[int, int]:
    if not operation.signature:
        return 0, 0
    if operation.target.startswith(("aten.convolution.", "aten.convolution_backward.")):
        return 0, _convolution_bytes(graph, operation)
    if "scaled_dot_product" in operation.target and "backward" in operation.target:
        size_bytes = _attention_bytes(operation)
        return size_bytes, size_bytes
    return 0, 0


def _attention_bytes(operation: Operation) -> int:
    """Return the temporaries of an attention's backward pass: gradients in 32 bits, and one number a row."""
    tensors = _tensors(operation)
    dtype, (batch, heads, rows, width) = tensors[1]
    key_heads, key_rows = tensors[2][1][1:3]
    if "flash" in operation.target:
        rows = _rounded(rows, _ROWS_OF_FLASH)
        size_bytes = batch * heads * rows * (_rounded(width, 32) + 1) * _ACCUMULATED_BYTES
        if key_heads != heads:  # gradients of keys and values come for all heads, and are added up
            size_bytes += 2 * batch * heads * key_rows * width * _ITEM_BYTES.get(dtype, 4)
        return size_bytes
    size_bytes = batch * heads * rows * _ACCUMULATED_BYTES
    if dtype != "float32":
        size_bytes += batch * heads * _rounded(rows, _ROWS_OF_EFFICIENT) * _rounded(width, 64) * _ACCUMULATED_BYTES
    return size_bytes


def _convolution_bytes(graph: Graph, operation: Operation) -> int:
    """Return the upper end for a convolution; one for each channel by itself runs in torch's own kernel, with none."""
    tensors = _tensors(operation)
    is_backward = "backward" in operation.target
    images, weight = (tensors[1], tensors[2]) if is_backward else (tensors[0], tensors[1])
    if weight[1][1] == 1 and images[1][1] > 1:
        return 0
    output_bytes = _bytes(*tensors[0]) if is_backward else graph.storages[operation.outputs[0]].size_bytes
    moved_bytes = _bytes(*images) + output_bytes
    is_wide = math.prod(weight[1][2:]) > 1 and images[0] == "float32" and images[1][1] >= _FEW_CHANNELS
    return int((_CONVOLUTION_SHARE if is_wide else _COPIED_SHARE) * moved_bytes)


def _tensors(operation: Operation) -> list[tuple[str, list[int]]]:
    """Return dtype and shape of every tensor that an operation is given."""
    _, args, _ = json.loads(operation.signature)
    contents = [arg["tensor"] for arg in args if isinstance(arg, dict) and "tensor" in arg]
    return [(dtype, shape) for dtype, shape, *_ in contents]


def _bytes(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * _ITEM_BYTES.get(dtype, 4)


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
