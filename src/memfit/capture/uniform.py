"""Comparisons that a number drawn between 0 and 1 answers whatever it is.

Note [Draws between 0 and 1]
    A layer that is left out at random asks whether a number it draws is below a probability, also where that is 0,
    as it is by default in transformers. No draw is below 0 and each is below 1, so such a comparison is known although
    the number is not. The number is drawn all the same, and the generator ends where eager's does.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten

_DRAWN = (aten.rand.default, aten.rand_like.default)
_SAME_NUMBERS = (aten.detach.default, aten.alias.default, aten.clone.default, aten.view.default, aten.reshape.default)
_PRECISE = (torch.float32, torch.float64)  # of narrower ones a number may be rounded to 1
_COMPARISONS: dict[Any, Callable[[float, float], bool]] = {
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
}
_MAY_BE_DRAWN = (0.0, 0.5)  # both are on the same side of all bounds up to 0, and of all from 1 on, but for 0 itself


class UniformDraws:
    """Which tensors hold numbers from 0 up to 1, without it, see Note [Draws between 0 and 1]."""

    def __init__(self) -> None:
        self._drawn: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def follow(self, function: Any, args: Any, result: Any) -> None:
        """Note what an operator draws; a write into anything may be one into a draw, by another name."""
        if function._schema.is_mutable:
            self._drawn.clear()
        elif self._is_drawn(function, args) and result.dtype in _PRECISE:
            self._drawn[result] = True

    def _is_drawn(self, function: Any, args: Any) -> bool:
        return function in _DRAWN or (function in _SAME_NUMBERS and args[0] in self._drawn)

    def compared(self, function: Any, args: Any) -> bool | None:
        """Return what a comparison says of all numbers that may be drawn; None if it says so of some alone."""
        if function not in _COMPARISONS or not isinstance(args[0], torch.Tensor) or args[0] not in self._drawn:
            return None
        compare, bound = _COMPARISONS[function], args[1]
        if isinstance(bound, bool) or not isinstance(bound, int | float) or 0 < bound < 1:
            return None
        answers = {compare(drawn, bound) for drawn in _MAY_BE_DRAWN}
        return answers.pop() if len(answers) == 1 else None
