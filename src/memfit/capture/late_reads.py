"""What code of the user's reads when the backward pass runs it: hooks on values, and functions of their own.

Note [Read late]
    A trace runs such code once, with what it reads at that moment. In eager it runs in the backward pass, which may
    come when something has changed since the forward pass. So the names that this code uses are noted, and what has
    such a name among all that the forward reads is compared once more before the backward pass.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from memfit.capture.held import is_foreign
from memfit.capture.refusals import Refusals


@dataclasses.dataclass(frozen=True)
class LateReads:
    """The names that code of the backward pass uses, and whether it asks for None where no gradient arrives."""

    names: frozenset[str] = frozenset()
    asks_for_none: bool = False

    @classmethod
    def of(cls, outputs: Sequence[torch.Tensor], seen: Refusals) -> "LateReads":
        """Look at the hooks that were seen, and at the functions behind outputs."""
        codes = [*seen.hooks, *_backwards_behind(outputs)]
        names = {name for code in codes if not is_foreign(code.co_filename) for name in _names_in(code)}
        return cls(frozenset(names), seen.asks_for_none)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)


def _backwards_behind(outputs: Sequence[torch.Tensor]) -> Iterator[CodeType]:
    """Yield the code of the backward passes that were written in Python."""
    seen: set[Any] = set()
    waiting: list[Any] = [each.grad_fn for each in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if isinstance(node, BackwardCFunction):
            function = getattr(node, "_forward_cls", None)
            code = getattr(getattr(function, "backward", None), "__code__", None)
            if code is not None:
                yield code
