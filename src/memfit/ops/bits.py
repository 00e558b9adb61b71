"""Two-valued tensors in one bit a value.

`pack` remembers where a tensor differs from zero, in the order of its memory; `unpack` gives a mask
of `bool` back. Dropout and the rectifiers keep their masks in the same form.

Note [Eight at a time]
    Eight values are packed at once as a 64-bit number of eight bytes, 0 or 1 each: multiplied by
    `_GATHER`, byte i ends up at bit i of the highest byte, and no two terms meet. The other way
    goes through a table of 256 numbers. Both are faster than comparisons and shifts of single
    values, which torch does not vectorise.
"""

from collections.abc import Iterator, Sequence

import torch

from memfit.ops.lean import Alternative, LeanOperator, Site, in_memory_order, is_worth_it, pieces, value_of

PIECE = 2**18  # values at a time: what a piece needs stays in the cache, and its scratch memory small
_GATHER = 0x0102040810204080
_EVERY_BYTE = 0x0101010101010101
_BIT_I_OF_BYTE_I = 0x8040201008040201 - 2**64


def pack(values: torch.Tensor) -> torch.Tensor:
    """One bit a value: whether it differs from zero (NaN does)."""
    flat = in_memory_order(values)
    bits = values.new_empty(bytes_of(values.numel()), dtype=torch.uint8)
    mask = values.new_empty(_scratch(values.numel()), dtype=torch.bool)
    for piece in pieces(values.numel(), PIECE):
        mask[: piece.stop - piece.start].copy_(flat[piece])
        gather(mask, bits, piece)
    return bits


def unpack(bits: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The mask of `bool` whose bits these are, in its own layout."""
    mask = torch.empty_strided(shape, stride, dtype=torch.bool, device=bits.device)
    flat = in_memory_order(mask)
    for piece, ones in spread(bits, mask.numel()):
        flat[piece].copy_(ones.view(torch.bool))
    return mask


def bytes_of(numel: int) -> int:
    """What a number of bits takes."""
    return -(-numel // 8)


def gather(mask: torch.Tensor, bits: torch.Tensor, piece: slice) -> None:
    """Write the bits of one piece; `mask` is scratch memory, and spoiled. See Note [Eight at a time]."""
    count = piece.stop - piece.start
    mask[count : 8 * bytes_of(count)].zero_()
    words = mask[: 8 * bytes_of(count)].view(torch.int64)
    words.mul_(_GATHER).bitwise_right_shift_(56)
    bits[piece.start // 8 : bytes_of(piece.stop)].copy_(words)


def spread(bits: torch.Tensor, numel: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Pieces of places in memory, each with 0 or 1 for every place, in one byte."""
    table = torch.arange(256, device=bits.device).mul_(_EVERY_BYTE).bitwise_and_(_BIT_I_OF_BYTE_I)
    ones = table.view(torch.uint8)
    ones.clamp_(max=1)
    words = bits.new_empty(_scratch(numel) // 8, dtype=torch.int64)
    for piece in pieces(numel, PIECE):
        packed = bits[piece.start // 8 : bytes_of(piece.stop)]
        some = words[: packed.numel()]
        torch.index_select(table, 0, packed.int(), out=some)
        yield piece, some.view(torch.uint8)[: piece.stop - piece.start]


def _scratch(numel: int) -> int:
    return min(8 * bytes_of(numel), PIECE)


def _alternatives(site: Site) -> Iterator[Alternative]:
    """Any mask of `bool` that is made in the forward pass."""
    value = value_of(site.node)
    if value is None or value.dtype is not torch.bool or site.is_backward or not site.makes_memory:
        return
    if is_worth_it(value):
        bits = Alternative(function=pack, args=(site.node,), of=site.node, form="bits")
        yield bits
        yield Alternative(function=unpack, args=(bits, list(value.shape), list(value.stride())), of=site.node)


BITS = LeanOperator(
    name="bits",
    technique="lean",
    keeps="masks of bool in one bit a value instead of one byte",
    exact=True,
    functions=(pack, unpack),
    alternatives=_alternatives,
)
