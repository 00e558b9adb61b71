"""ReLU, ReLU6, Hardtanh and LeakyReLU with one bit a value kept for the backward.

Their gradient is that of the output, let through or not (or scaled) value by value. Eager keeps the
whole output (ReLU) or input (the others) to know where; one bit does.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfit.ops.bits import PIECE, bytes_of, gather, pack, spread
from memfit.ops.lean import (
    Alternative,
    LeanOperator,
    Site,
    behind_detach,
    in_memory_order,
    is_worth_it,
    pieces,
    same_layout,
    seen_forward,
    value_of,
)

aten = torch.ops.aten


def pack_inside(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """One bit a value: whether Hardtanh lets its gradient through."""

    def inside(some: torch.Tensor) -> torch.Tensor:
        ones: torch.Tensor = aten.hardtanh_backward(torch.ones_like(some), some, low, high)  # asks as eager does
        return ones

    return _pack_where(values, inside)


def pack_positive(values: torch.Tensor) -> torch.Tensor:
    """One bit a value: whether it is above zero (NaN is not)."""
    return _pack_where(values, lambda some: some > 0)


def let_through(gradient: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The gradient where its bit is set, else zero."""
    return _let_through(gradient, bits, torch.empty_like(gradient))


def let_through_(gradient: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The same, into the gradient."""
    return _let_through(gradient, bits, gradient)


def _let_through(gradient: torch.Tensor, bits: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    flat, flat_gradient = in_memory_order(result), in_memory_order(gradient)
    for piece, mask in _masks(gradient, bits):
        # Not a product, which would let NaN and infinity through; not `where`, which is several times slower.
        aten.threshold_backward.grad_input(flat_gradient[piece], mask, 0, grad_input=flat[piece])
    return result


def let_through_or_scale(gradient: torch.Tensor, bits: torch.Tensor, slope: float) -> torch.Tensor:
    """The gradient where its bit is set, else `slope` times it."""
    return _let_through_or_scale(gradient, bits, slope, torch.empty_like(gradient))


def let_through_or_scale_(gradient: torch.Tensor, bits: torch.Tensor, slope: float) -> torch.Tensor:
    """The same, into the gradient."""
    return _let_through_or_scale(gradient, bits, slope, gradient)


def _let_through_or_scale(
    gradient: torch.Tensor, bits: torch.Tensor, slope: float, result: torch.Tensor
) -> torch.Tensor:
    flat, flat_gradient = in_memory_order(result), in_memory_order(gradient)
    for piece, mask in _masks(gradient, bits):
        aten.leaky_relu_backward.grad_input(flat_gradient[piece], mask, slope, False, grad_input=flat[piece])
    return result


def _masks(gradient: torch.Tensor, bits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Piece by piece, the bits as ones and zeros of the gradient's own kind."""
    scratch = gradient.new_empty(min(gradient.numel(), PIECE))
    for piece, ones in spread(bits, gradient.numel()):
        yield piece, scratch[: ones.numel()].copy_(ones)


def _pack_where(values: torch.Tensor, condition: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    flat = in_memory_order(values)
    bits = values.new_empty(bytes_of(values.numel()), dtype=torch.uint8)
    mask = values.new_empty(min(8 * bytes_of(values.numel()), PIECE), dtype=torch.bool)
    for piece in pieces(values.numel(), PIECE):
        mask[: piece.stop - piece.start].copy_(condition(flat[piece]))
        gather(mask, bits, piece)
    return bits


def _alternatives(site: Site) -> Iterator[Alternative]:
    rules = _RULES.get(site.node.target)
    args: Any = site.node.args
    if rules is None or (site.node.target is aten.threshold_backward.default and not _is_of_relu(args)):
        return
    gradient, result = value_of(args[0]), value_of(site.node)
    value = value_of(behind_detach(args[1]))
    if gradient is None or result is None or value is None or not same_layout(gradient, result, value):
        return
    decisive = seen_forward(behind_detach(args[1]))  # bits are in the order of memory, which views share
    whole = value_of(decisive)
    if is_worth_it(value) and whole is not None and is_worth_it(whole):
        packing, packing_constants, backward, backward_constants = rules(args)
        bits = Alternative(function=packing, args=(decisive, *packing_constants), of=decisive, form="bits")
        yield bits
        yield Alternative(function=backward, args=(args[0], bits, *backward_constants), of=site.node)


def _is_of_relu(args: Any) -> bool:
    """ReLU's output is never below zero, so that what differs from zero (NaN does) lets its gradient through."""
    return args[2] == 0 and getattr(behind_detach(args[1]), "target", None) is aten.relu.default


# By backward operator, from its arguments: what packs the bits, what works from them, each with its constants.
_RULES: dict[Any, Callable[[Any], tuple[Any, tuple[Any, ...], Any, tuple[Any, ...]]]] = {
    aten.threshold_backward.default: lambda _: (pack, (), let_through, ()),
    aten.hardtanh_backward.default: lambda args: (pack_inside, tuple(args[2:4]), let_through, ()),
    aten.leaky_relu_backward.default: lambda args: (pack_positive, (), let_through_or_scale, (args[2],)),
}


RELU = LeanOperator(
    name="relu",
    technique="lean",
    keeps="whether the gradient is let through, in one bit a value instead of the output or input",
    exact=True,
    functions=(pack, pack_inside, pack_positive, let_through, let_through_or_scale),
    alternatives=_alternatives,
    in_place={let_through: let_through_, let_through_or_scale: let_through_or_scale_},
)
