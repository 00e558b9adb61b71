"""Bytes that CUDA's libraries take beside the tensors of a step: exact where a rule is known, else a range.

Sources: cuBLAS workspaces, `aten/src/ATen/cuda/CublasHandlePool.cpp`; temporaries of attention, flash attention's
`flash_api.cpp` (`mha_bwd`) and `transformers/cuda/attention_backward.cu`.

Note [Workspaces of convolutions]
    cuDNN does not publish them, so they are a range. The lower end is none, which is what published peaks of ResNet-50
    show. The upper end depends on what may run:
    - Algorithms that transform images (Winograd's, Fourier's) work on 32 bits, kernels of more than one element, stride
      and dilation 1 and one group. One published peak shows such a workspace, that of VGG-16, batch 128, on an RTX
      4090: 4.3 times input and output of its second convolution. Both its peaks together are only possible if that was
      in the forward pass, so backward passes have no more than copies. Images of few channels show none.
    - Tensor cores want channels last. Where images are not, cuDNN copies input and output at most. They take 16 bits
      from compute capability 7.0 on, and 32 bits from 8.0 on, if TF32 is allowed and channels come in fours (NVIDIA's
      "Convolutional Layers User's Guide").
    - One channel for each filter runs in torch's own kernel, with none.
    - With `torch.backends.cudnn.benchmark` every algorithm is tried once, with as much as is free on the device
      (`getMaxWorkspaceSize`, `cudnn/ConvShared.cpp` and `Conv_v7.cpp`), and the peak has seen that.

Note [Buffers of NCCL]
    A communicator takes memory beside torch's allocator: for every channel and connection three buffers, in blocks of
    2 MiB (`NCCL_BUFFSIZE` and its kind, 10 MiB together, as NVIDIA/nccl issue 1685 logs them), and 2 MiB at the sender.
    How many channels there are depends on the links between the GPUs, which no model tells: two at least. The upper
    ends are records: 688 MB for four A100 with NVLink (issue 964), 1.6 GB for eight newer ones (issue 864).
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

from memfit.ir import Graph, Operation

_MIB = 2**20
_SMALL_CUBLAS_BYTES = 8_519_680  # `:4096:2:16:8`
_BIG_CUBLAS_BYTES = 32 * _MIB
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.addmv.", "aten.mv.")
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_ROWS_OF_FLASH = 128  # sequences are rounded up to it
_ROWS_OF_EFFICIENT = 64
_ACCUMULATED_BYTES = 4  # attention adds up in 32 bits
_TRANSFORMED_SHARE = 4.3  # of input and output, for algorithms that transform all images
_FEW_CHANNELS = 16  # of images that no published peak shows such an algorithm for
_COPIED_SHARE = 1.0  # of input and output, for a copy of both in another layout
_CHANNELS_TOGETHER = 4  # that tensor cores take of 32 bits
_ALL_THAT_IS_FREE = 2**62

_NCCL_LEAST_BYTES = 2 * 12 * _MIB  # two channels of one connection
_NCCL_MOST_BYTES = 688_000_000
_NCCL_MOST_BYTES_OF_HOPPER = 1_600_000_000

NCCL_REASON = "how many channels NCCL makes between these GPUs"
CONVOLUTION_REASON = "the algorithms that cuDNN chooses for convolutions, whose workspaces it does not publish"
SEARCH_REASON = "the algorithms that cuDNN tries for convolutions, with up to all memory that is free"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionSettings:
    """Hold what a user lets cuDNN do, as `torch.backends.cudnn` has it."""

    searches: bool = False  # `benchmark`
    allows_tf32: bool = True

    @property
    def reason(self) -> str:
        """Say what decides how much convolutions take."""
        return SEARCH_REASON if self.searches else CONVOLUTION_REASON


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LibraryBytes:
    """What libraries take on a device, by operation and for good."""

    lowest: tuple[int, ...]  # workspaces by operation
    highest: tuple[int, ...]
    handles: Mapping[int, int]  # cuBLAS workspaces, by the operation that is first to need one in its thread


def library_bytes(
    graph: Graph, capability: tuple[int, int], convolutions: ConvolutionSettings | None = None
) -> LibraryBytes:
    """Find what the operations of a graph take on a device of this compute capability."""
    convolutions = convolutions or ConvolutionSettings()
    ranges = [_workspace(graph, operation, capability, convolutions) for operation in graph.operations]
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


def nccl_bytes(capability: tuple[int, int]) -> tuple[int, int]:
    """Return the least and the most that one communicator takes, see Note [Buffers of NCCL].

    >>> nccl_bytes((8, 0))
    (25165824, 688000000)
    """
    return _NCCL_LEAST_BYTES, _NCCL_MOST_BYTES_OF_HOPPER if capability >= (9, 0) else _NCCL_MOST_BYTES


def _workspace(
    graph: Graph, operation: Operation, capability: tuple[int, int], convolutions: ConvolutionSettings
) -> tuple[int, int]:
    if not operation.signature:
        return 0, 0
    if operation.target.startswith(("aten.convolution.", "aten.convolution_backward.")):
        return 0, int(_convolution_bytes(graph, operation, capability, convolutions))
    if "scaled_dot_product" in operation.target and "backward" in operation.target:
        size_bytes = _attention_bytes(operation)
        return size_bytes, size_bytes
    return 0, 0


def _attention_bytes(operation: Operation) -> int:
    """Return the temporaries of an attention's backward pass: gradients in 32 bits, and one number a row."""
    tensors = _tensors(operation)
    dtype, (batch, heads, rows, width), _ = tensors[1]
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


def _convolution_bytes(
    graph: Graph, operation: Operation, capability: tuple[int, int], convolutions: ConvolutionSettings
) -> float:
    """Return the upper end for a convolution, see Note [Workspaces of convolutions]."""
    tensors = _tensors(operation)
    is_backward = "backward" in operation.target
    images, weight = (tensors[1], tensors[2]) if is_backward else (tensors[0], tensors[1])
    (dtype, shape, strides), kernel = images, weight[1]
    if kernel[1] == 1 and shape[1] > 1:
        return 0
    if convolutions.searches:
        return _ALL_THAT_IS_FREE
    if strides[1] == 1 and math.prod(shape[2:]) > 1:  # channels last, as every algorithm for tensor cores wants it
        return 0
    output_bytes = _bytes(*tensors[0]) if is_backward else graph.storages[operation.outputs[0]].size_bytes
    moved_bytes = _bytes(*images) + output_bytes
    if not is_backward and dtype == "float32" and shape[1] >= _FEW_CHANNELS and _may_be_transformed(operation, kernel):
        return _TRANSFORMED_SHARE * moved_bytes
    takes_tf32 = convolutions.allows_tf32 and not any(size % _CHANNELS_TOGETHER for size in (shape[1], kernel[0]))
    on_tensor_cores = capability >= (8, 0) and takes_tf32 if dtype == "float32" else capability >= (7, 0)
    return _COPIED_SHARE * moved_bytes if on_tensor_cores else 0


def _may_be_transformed(operation: Operation, kernel: Sequence[int]) -> bool:
    """Tell whether algorithms that transform images can compute a convolution's forward pass."""
    arguments = json.loads(operation.signature)[1]
    stride, _, dilation, transposed, _, groups = arguments[3:9]
    plain = all(each == 1 for each in (*stride, *dilation, groups)) and not transposed
    return plain and math.prod(kernel[2:]) > 1


def _tensors(operation: Operation) -> list[tuple[str, list[int], list[int]]]:
    """Return dtype, shape and strides of every tensor that an operation is given."""
    _, args, _ = json.loads(operation.signature)
    contents = [arg["tensor"] for arg in args if isinstance(arg, dict) and "tensor" in arg]
    return [(dtype, shape, strides) for dtype, shape, strides, *_ in contents]


def _bytes(dtype: str, shape: list[int], _strides: list[int]) -> int:
    return math.prod(shape) * _ITEM_BYTES.get(dtype, 4)


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
