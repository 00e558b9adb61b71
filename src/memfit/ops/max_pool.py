"""Max-pooling with its indices in one byte each, and a backward that needs nothing else.

The operator keeps, for its backward, where in the image each maximum was: an index of 64 bits. In
one byte is kept where in its window it was. Its backward also asks for the input, of which it
reads only the shape.

Note [Places in windows]
    The index of row r and column c of an image W wide is r * W + c. Beside the first index of
    its window it is offset = kr * D + kc * dw, with D = dh * W and (kr, kc) the place in the
    window (dh, dw: dilation). As long as a row of the window is narrower than D, kr and kc follow from
    the offset by division, and the offset from them. Computed in float32, which is fast and, below 2**24, exact.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memfit.ops.lean import Alternative, LeanOperator, Site, is_dense, is_worth_it, pieces, value_of

aten = torch.ops.aten
_PIECE = 2**18  # indices at a time
_LARGEST_EXACT = 2**24


def pack_indices(indices: torch.Tensor, image: Sequence[int], window: Sequence[Sequence[int]]) -> torch.Tensor:
    """Where in its window each index points, in one byte. `window`: kernel, stride, padding, dilation."""
    kernel, _, _, dilation = window
    row = dilation[0] * image[1]
    places = torch.empty_like(indices, dtype=torch.uint8)
    first = _first_indices(indices, image, window)
    for some, out in _pieces(indices, places):
        offset = some.to(torch.float32).sub_(first)
        window_row = offset.add(0.5).div_(row).floor_()
        offset.sub_(window_row, alpha=row).div_(dilation[1])
        # To int32 first: torch converts float32 to uint8 value by value.
        out.copy_(offset.add_(window_row, alpha=kernel[1]).to(torch.int32))
    return places


def unpack_indices(places: torch.Tensor, image: Sequence[int], window: Sequence[Sequence[int]]) -> torch.Tensor:
    """The indices whose places in windows these are."""
    kernel, _, _, dilation = window
    offset = places.to(torch.float32)
    window_row = offset.add(0.5).div_(kernel[1]).floor_()
    offset.mul_(dilation[1]).add_(window_row, alpha=dilation[0] * image[1] - dilation[1] * kernel[1])
    offset.add_(_first_indices(places, image, window))
    # Of what `pack_indices` made, all are inside the image; of made-up places they need not be.
    return offset.clamp_(0, image[0] * image[1] - 1).to(torch.int64)


def backward_from_places(
    gradient: torch.Tensor,
    places: torch.Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    window: Sequence[Sequence[int]],
    ceil_mode: bool,
) -> torch.Tensor:
    """The gradient of the input (of this shape and stride), from that of the output and the places of the maxima."""
    result = torch.empty_strided(shape, stride, dtype=gradient.dtype, device=gradient.device)
    for some_places, some, out in _pieces(places, gradient, result):
        indices = unpack_indices(some_places, shape[-2:], window)
        # The second argument stands for the input, of which the operator reads nothing but the shape.
        aten.max_pool2d_with_indices_backward.grad_input(some, out, *window, ceil_mode, indices, grad_input=out)
    return result


def _first_indices(outputs: torch.Tensor, image: Sequence[int], window: Sequence[Sequence[int]]) -> torch.Tensor:
    """The index of the first place of each window; in the padding it is outside the image."""
    _, stride, padding, _ = window
    rows, columns = (
        torch.arange(size, device=outputs.device, dtype=torch.float32).mul_(step).sub_(before)
        for size, step, before in zip(outputs.shape[-2:], stride, padding, strict=True)
    )
    return rows.mul_(image[1]).unsqueeze(1) + columns


def _pieces(outputs: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same planes (images of one channel) of all tensors, a few at a time."""
    tensors = (outputs, *others)
    if all(each.is_contiguous() for each in tensors):
        tensors = tuple(each.flatten(0, -3).unsqueeze(1) for each in tensors)
    elif outputs.dim() == 3:
        tensors = tuple(each.unsqueeze(0) for each in tensors)
    count = max(1, _PIECE // max(1, tensors[0][:1].numel()))
    for piece in pieces(tensors[0].shape[0], count):
        yield tuple(each[piece] for each in tensors)


def _alternatives(site: Site) -> Iterator[Alternative]:
    node = site.node
    if node.target is not aten.max_pool2d_with_indices_backward.default:
        return
    args: Any = node.args
    gradient, _, *window, ceil_mode, indices = args
    result, index_values = value_of(node), value_of(indices)
    if result is None or index_values is None or not is_worth_it(index_values):
        return
    pairs = _pairs(window)
    if not _can_pack(result, pairs) or not is_dense(result):
        return
    places = Alternative(
        function=pack_indices, args=(indices, list(result.shape[-2:]), pairs), of=indices, form="places"
    )
    yield places
    layout = (list(result.shape), list(result.stride()))
    yield Alternative(function=backward_from_places, args=(gradient, places, *layout, pairs, ceil_mode), of=node)


def _pairs(window: list[Any]) -> list[list[int]]:
    """Kernel, stride, padding and dilation by row and column; a stride that is not given is the kernel's."""
    kernel, stride, padding, dilation = (list(each) * (2 // max(1, len(each))) for each in window)
    return [kernel, stride or kernel, padding, dilation]


def _can_pack(image: torch.Tensor, window: list[list[int]]) -> bool:
    """See Note [Places in windows]."""
    kernel, _, _, dilation = window
    height, width = image.shape[-2:]
    return (
        kernel[0] * kernel[1] <= 256
        and (kernel[1] - 1) * dilation[1] < dilation[0] * width
        and (height + kernel[0] * dilation[0]) * width < _LARGEST_EXACT
    )


MAX_POOL = LeanOperator(
    name="max_pool",
    technique="lean",
    keeps="the place of each maximum in its window, in one byte instead of eight, and not the input",
    exact=True,
    functions=(pack_indices, backward_from_places),
    alternatives=_alternatives,
)
