"""Note what code of the user's reads when the backward pass runs it: hooks on values, functions of their own.

Note [Read late]
    A trace runs such code once, with what it reads at that moment. In eager it runs in the backward pass, which may
    come when something has changed since the forward pass. So the names that this code uses are noted, and what has
    such a name among all that the forward reads is compared once more before the backward pass. What the code reaches
    by these names, from what it has closed over and what a function keeps for its backward pass, is read with the
    forward, so that it is compared like all else.
"""

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from memfit.capture.held import is_foreign, is_object
from memfit.capture.refusals import Refusals

_NOT_READ = (property, types.FunctionType, staticmethod, classmethod)


@dataclasses.dataclass(frozen=True)
class LateReads:
    """The names that code of the backward pass uses."""

    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, outputs: Sequence[torch.Tensor], seen: Refusals) -> "LateReads":
        """Look at the hooks that were seen, and at the functions behind outputs, and read what they will read."""
        names: set[str] = set()
        for function, held in (*map(_of_hook, seen.hooks), *_of_functions(outputs)):
            used = _names_used_by(function)
            _read(held, used)
            names |= used
        return cls(frozenset(names))


_Late = tuple[Any, list[Any]]  # a function, and what it has at hand


def _of_hook(hook: Any) -> _Late:
    function = inspect.unwrap(getattr(hook, "__func__", getattr(hook, "func", hook)))
    held = [getattr(hook, "__self__", None), *getattr(hook, "args", ()), *getattr(hook, "keywords", {}).values()]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            held.append(cell.cell_contents)
    return function, [*held, *(getattr(function, "__defaults__", None) or ())]


def _of_functions(outputs: Sequence[torch.Tensor]) -> Iterator[_Late]:
    """Yield the backward passes behind outputs that were written in Python."""
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
            yield getattr(function, "backward", None), [*vars(node).values()]


def _names_used_by(function: Any) -> set[str]:
    """Return the names in the code of a function of the user's, and of the functions that it names."""
    names: set[str] = set()
    seen: set[Any] = set()
    waiting = [function]
    while waiting:
        each = waiting.pop()
        code = getattr(each, "__code__", None)
        if code is not None and code not in seen and not is_foreign(code.co_filename):
            seen.add(code)
            found = set(_names_in(code))
            names |= found
            waiting += [each.__globals__[name] for name in found & each.__globals__.keys()]
    return names


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names_in(each)


def _read(held: list[Any], names: set[str]) -> None:
    """Read attributes of these names, of what is held and of what is found so."""
    seen: set[int] = set()
    waiting = [each for each in held if isinstance(each, nn.Module) or is_object(each)]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        for name in names:
            if not isinstance(inspect.getattr_static(thing, name, property), (*_NOT_READ, type)):
                value = getattr(thing, name, None)
                waiting += [value] if isinstance(value, nn.Module) or is_object(value) else []
