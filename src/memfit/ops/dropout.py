"""Dropout with its noise in one bit a value.

On CPU dropout draws ones and zeros in the values' own dtype, divides them by the probability to
keep, and multiplies: `bernoulli`, `div`, `mul`. The noise is read again in the backward pass.
In bits it is as good: every value of it is 0 or one over that probability.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from memfit.ops.bits import PIECE, pack, spread
from memfit.ops.lean import (
    Alternative,
    LeanOperator,
    Site,
    behind_detach,
    behind_views,
    in_memory_order,
    is_worth_it,
    same_layout,
    value_of,
)

aten = torch.ops.aten


def unpack_noise(
    bits: torch.Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, divisor: float
) -> torch.Tensor:
    """The noise whose bits these are, in its own layout."""
    noise = torch.empty_strided(shape, stride, dtype=dtype, device=bits.device)
    flat = in_memory_order(noise)
    scale = _scale(noise, divisor)
    for piece, ones in spread(bits, noise.numel()):
        flat[piece].copy_(ones).mul_(scale)
    return noise


def apply_noise(values: torch.Tensor, bits: torch.Tensor, divisor: float) -> torch.Tensor:
    """`values` times the noise whose bits these are, which is never whole in memory."""
    result = torch.empty_like(values)
    flat, flat_values = in_memory_order(result), in_memory_order(values)
    scale = _scale(values, divisor)
    scratch = values.new_empty(min(values.numel(), PIECE))
    for piece, ones in spread(bits, values.numel()):
        noise = scratch[: ones.numel()].copy_(ones).mul_(scale)
        torch.mul(flat_values[piece], noise, out=flat[piece])
    return result


def _scale(like: torch.Tensor, divisor: float) -> torch.Tensor:
    return like.new_ones(1).div_(divisor)  # by the operator that made the noise, so that it rounds the same


def _alternatives(site: Site) -> Iterator[Alternative]:
    noise = site.node
    value = value_of(noise)
    if value is None or site.is_backward or not _is_noise(noise) or not is_worth_it(value):
        return
    divisor: Any = noise.args[1] if _is_scaled(noise) else 1.0
    bits = Alternative(function=pack, args=(noise,), of=noise, form="bits")
    yield bits
    layout = (list(value.shape), list(value.stride()), value.dtype)
    yield Alternative(function=unpack_noise, args=(bits, *layout, divisor), of=noise)
    for product, factor in _products(noise):
        yield Alternative(function=apply_noise, args=(factor, bits, divisor), of=product)


def _is_noise(node: fx.Node) -> bool:
    """Whether a node makes the noise of dropout; what is drawn counts only if it is not scaled afterwards."""
    return _is_scaled(node) or (_is_drawn(node) and not _is_scaled_later(node))


def _is_drawn(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.bernoulli.p


def _is_scaled(node: fx.Node) -> bool:
    """A generator fills a tensor that is not contiguous through a view, so there may be one in between."""
    return (
        node.target in (aten.div.Scalar, aten.div.Tensor)
        and _is_drawn(behind_views(node.args[0]))
        and isinstance(node.args[1], int | float)
        and node.args[1] > 0
    )


def _is_scaled_later(node: fx.Node) -> bool:
    return any(_is_scaled(user) or (user is not behind_views(user) and _is_scaled_later(user)) for user in node.users)


def _products(noise: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Where the noise is multiplied with something of its own layout, and with what."""
    for user in noise.users:
        if behind_detach(user) is noise and user is not noise:
            yield from _products(user)
        elif user.target is aten.mul.Tensor:
            factors = [factor for factor in user.args if isinstance(factor, fx.Node) and factor is not noise]
            values = [value for value in map(value_of, (noise, user, *factors)) if value is not None]
            if len(factors) == 1 and len(values) == 3 and same_layout(*values):
                yield user, factors[0]


DROPOUT = LeanOperator(
    name="dropout",
    technique="lean",
    keeps="the noise in one bit a value instead of a number",
    exact=True,
    functions=(pack, unpack_noise, apply_noise),
    alternatives=_alternatives,
)
