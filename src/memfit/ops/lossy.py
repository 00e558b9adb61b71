"""Kept activations in 16, 8 or 4 bits: not exact, and only on request.

Any value that is kept for the backward can be kept with fewer bits. The forward pass is not
touched, so the loss stays as it is; gradients change by what is rounded away. A technique is
switched on by its name: "16-bit", "8-bit", "4-bit".

Note [Groups]
    With 8 and 4 bits, the values of a group (neighbours in memory) lie on an even grid between the
    smallest and the largest of them, so that the error is at most half a step of the grid. Rounding is
    to nearest and draws no random numbers. One NaN or infinity makes a whole group NaN.
    A form is one tensor of bytes: first the codes, then smallest value and step of every group.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from memfit.ops.lean import Alternative, LeanOperator, Site, in_memory_order, is_worth_it, pieces, value_of

GROUP = 128
_PIECE = 2**17  # values at a time, a multiple of the group
_HEADER_BYTES = 8  # of a group: its smallest value and its step, in float32
_SMALLEST_STEP = 1e-30  # of a group of equal values, whose codes are all 0


def to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """The values in 16 bits, with the range of float32."""
    return values.to(torch.bfloat16)


def from_bfloat16(form: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values that `to_bfloat16` rounded."""
    return form.to(dtype)


def pack_8_bits(values: torch.Tensor) -> torch.Tensor:
    """One byte a value, see Note [Groups]."""
    return _pack(values, 8)


def unpack_8_bits(form: torch.Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The values that `pack_8_bits` rounded."""
    return _unpack(form, shape, stride, dtype, 8)


def pack_4_bits(values: torch.Tensor) -> torch.Tensor:
    """Half a byte a value, see Note [Groups]."""
    return _pack(values, 4)


def unpack_4_bits(form: torch.Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The values that `pack_4_bits` rounded."""
    return _unpack(form, shape, stride, dtype, 4)


def _pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    numel = values.numel()
    flat = in_memory_order(values)
    groups = -(-numel // GROUP)
    code_bytes = groups * GROUP * bits // 8
    form = values.new_empty(code_bytes + groups * _HEADER_BYTES, dtype=torch.uint8)
    codes, headers = form[:code_bytes], form[code_bytes:].view(torch.float32).view(groups, 2)
    for piece in pieces(numel, _PIECE):
        some = _in_groups(flat[piece])
        header = headers[piece.start // GROUP :][: len(some)]
        low, high = some.amin(1, keepdim=True), some.amax(1, keepdim=True)
        step = (high - low).div_(2**bits - 1).clamp_(min=_SMALLEST_STEP)
        header[:, :1], header[:, 1:] = low, step
        # To int32 first: torch converts float32 to uint8 value by value.
        grid = (some - low).div_(step).round_().to(torch.int32).to(torch.uint8).view(-1)
        if bits == 4:
            pairs = grid.view(torch.int16)
            grid = pairs.bitwise_or(pairs.bitwise_right_shift(4)).to(torch.uint8)
        codes[piece.start * bits // 8 :][: grid.numel()].copy_(grid)
    return form


def _unpack(
    form: torch.Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, bits: int
) -> torch.Tensor:
    values = torch.empty_strided(shape, stride, dtype=dtype, device=form.device)
    numel = values.numel()
    flat = in_memory_order(values)
    groups = -(-numel // GROUP)
    code_bytes = groups * GROUP * bits // 8
    codes, headers = form[:code_bytes], form[code_bytes:].view(torch.float32).view(groups, 2)
    for piece in pieces(numel, _PIECE):
        count = -(-(piece.stop - piece.start) // GROUP)
        header = headers[piece.start // GROUP :][:count]
        some = codes[piece.start * bits // 8 :][: count * GROUP * bits // 8]
        if bits == 4:
            pairs = some.to(torch.int16)
            some = pairs.bitwise_or(pairs.bitwise_left_shift(4)).bitwise_and_(0x0F0F).view(torch.uint8)
        grid = some.to(torch.float32).view(count, GROUP)
        grid.mul_(header[:, 1:]).add_(header[:, :1])
        flat[piece].copy_(grid.view(-1)[: piece.stop - piece.start])
    return values


def _in_groups(flat: torch.Tensor) -> torch.Tensor:
    """The values group by group in float32, the last group filled up with its last value."""
    missing = -len(flat) % GROUP
    if missing:
        flat = torch.cat((flat, flat[-1:].expand(missing)))
    return flat.to(torch.float32).view(-1, GROUP)


def _bfloat16_alternatives(site: Site) -> Iterator[Alternative]:
    value = value_of(site.node)
    if value is not None and value.dtype in (torch.float32, torch.float64) and _can_be_rounded(site, value):
        form = Alternative(function=to_bfloat16, args=(site.node,), of=site.node, form="bfloat16")
        yield form
        yield Alternative(function=from_bfloat16, args=(form, value.dtype), of=site.node)


def _grouped_alternatives(
    pack: Callable[..., torch.Tensor], unpack: Callable[..., torch.Tensor], name: str
) -> Callable[[Site], Iterator[Alternative]]:
    def alternatives(site: Site) -> Iterator[Alternative]:
        value = value_of(site.node)
        if value is not None and value.is_floating_point() and _can_be_rounded(site, value):
            form = Alternative(function=pack, args=(site.node,), of=site.node, form=name)
            yield form
            layout = (list(value.shape), list(value.stride()), value.dtype)
            yield Alternative(function=unpack, args=(form, *layout), of=site.node)

    return alternatives


def _can_be_rounded(site: Site, value: torch.Tensor) -> bool:
    return site.is_kept and site.makes_memory and is_worth_it(value)


SIXTEEN_BIT = LeanOperator(
    name="16-bit",
    technique="16-bit",
    keeps="any activation of single or double precision as bfloat16",
    exact=False,
    functions=(to_bfloat16, from_bfloat16),
    alternatives=_bfloat16_alternatives,
)
EIGHT_BIT = LeanOperator(
    name="8-bit",
    technique="8-bit",
    keeps="any activation on 256 levels between smallest and largest of 128 values",
    exact=False,
    functions=(pack_8_bits, unpack_8_bits),
    alternatives=_grouped_alternatives(pack_8_bits, unpack_8_bits, "8-bit"),
)
FOUR_BIT = LeanOperator(
    name="4-bit",
    technique="4-bit",
    keeps="any activation on 16 levels between smallest and largest of 128 values",
    exact=False,
    functions=(pack_4_bits, unpack_4_bits),
    alternatives=_grouped_alternatives(pack_4_bits, unpack_4_bits, "4-bit"),
)
