"""Everything that a forward can change: what is reached from its model, and what the code that it may run names.

Note [Code that may run]
    From the forwards of all modules on, code is followed by the names in it: a global that is named is looked into,
    and so is a method of that name of any class that was met. That is more than what runs, and found without running.
    Libraries' own code (torch, NumPy, Python) is not followed; what it wraps (`torch.no_grad`) is.
"""

import contextlib
import functools
import types
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memfit.capture.held import (
    CONTAINERS,
    MOST_ELEMENTS,
    Slots,
    has_attributes,
    is_foreign,
    is_own_class,
    is_standard,
    values_in,
)
from memfit.capture.outputs import is_constant

_RUN_UNNAMED = {"forward", "backward", "setup_context"}  # by torch

Home = tuple[str, Any, str]  # a path, and a name in a dictionary, a closure or a class


class Reachable:
    """Looks from some roots at all that they lead to, each thing once."""

    def __init__(self, roots: Sequence[tuple[str, Any]]) -> None:
        """`roots` are values and what they are called."""
        self.things: dict[int, tuple[str, Any]] = {}  # by identity: with a path, also keeps identities
        self.globals: dict[tuple[int, str], Home] = {}
        self.cells: dict[int, types.CellType] = {}
        self.classes: dict[type, None] = {}
        self._names = {*_RUN_UNNAMED}
        self._unnamed: defaultdict[str, list[Any]] = defaultdict(list)  # members of classes that nobody has named
        self._codes: set[types.CodeType] = set()
        self._waiting = [*roots]
        while self._waiting:
            self._look_at(*self._waiting.pop())

    def _look_at(self, path: str, value: Any) -> None:
        if id(value) in self.things or (is_constant(value) and not isinstance(value, type)):
            return
        self.things[id(value)] = (path, value)
        if isinstance(value, type):
            self._look_at_class(value)
        elif isinstance(value, types.FunctionType):
            self._look_at_function(path, value)
        elif isinstance(value, CONTAINERS):
            self._look_into_container(path, value)
        self._waiting += [(path, each) for each in _behind(value)]
        if self.has_attributes(value):
            self._look_into_attributes(path, value)

    @staticmethod
    def has_attributes(value: Any) -> bool:
        """Return whether the attributes of a value are looked into."""
        return not isinstance(value, torch.Tensor | type | types.ModuleType) and has_attributes(value)

    def _look_into_container(self, path: str, container: Any) -> None:
        elements = values_in(container)
        if len(elements) <= MOST_ELEMENTS:
            keys = dict.keys(container) if isinstance(container, dict) else range(len(elements))
            self._waiting += [
                (f"{path}[{key!r}]" if isinstance(key, str | int) else f"{path}[...]", each)
                for key, each in zip(keys, elements, strict=True)
                if not is_constant(each)
            ]

    def _look_into_attributes(self, path: str, value: Any) -> None:
        self._look_at_class(type(value))
        for home in homes_of(value):
            for name in [*home.keys()]:
                each = home[name]
                if isinstance(value, nn.Module) and name in ("_parameters", "_buffers", "_modules"):
                    self.things[id(each)] = (path, each)
                    self._waiting += [(f"{path}.{key}".lstrip("."), part) for key, part in each.items()]
                elif not is_constant(each):
                    self._waiting.append((f"{path}.{name}".lstrip("."), each))

    def _look_at_class(self, cls: type) -> None:
        for each in cls.__mro__:
            if each in self.classes or not is_own_class(each) or is_standard(each):
                continue
            self.classes[each] = None
            for name, value in [*each.__dict__.items()]:
                is_special = name.startswith("__")
                is_run = is_special and name != "__init__"
                if not _is_code(value):
                    if is_special or is_constant(value):  # of Python's own making
                        continue
                    self._waiting.append((f"{each.__name__}.{name}", value))
                elif is_run or name in self._names:
                    self._waiting.append((f"{each.__name__}.{name}", value))
                else:
                    self._unnamed[name].append((f"{each.__name__}.{name}", value))

    def _look_at_function(self, path: str, function: types.FunctionType) -> None:
        wrapped = function.__dict__.get("__wrapped__")
        if wrapped is not None:
            self._waiting.append((path, wrapped))
        if is_foreign(function.__code__.co_filename):
            return
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._waiting += [(f"a default of {path}", each) for each in defaults]
        if function.__dict__:
            self._waiting.append((path, function.__dict__))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.cells[id(cell)] = cell
            with contextlib.suppress(ValueError):  # an empty cell
                self._waiting.append((name, cell.cell_contents))
        self._look_at_code(function.__code__, function.__globals__)

    def _look_at_code(self, code: types.CodeType, around: dict[str, Any]) -> None:
        if code in self._codes:
            return
        self._codes.add(code)
        for name in code.co_names:
            if name not in self._names:
                self._names.add(name)
                self._waiting += self._unnamed.pop(name, ())
            if name in around:
                self._look_at_named(code, name, around, name)
        for each in code.co_consts:
            if isinstance(each, types.CodeType):
                self._look_at_code(each, around)

    def _look_at_named(self, code: types.CodeType, path: str, home: dict[str, Any], name: str) -> None:
        """Look at a global, and at what code may name of a module."""
        value = home[name]
        if not isinstance(value, types.ModuleType):
            self.globals[id(home), name] = (path, home, name)
            self._waiting.append((path, value))
        elif not is_foreign(getattr(value, "__file__", None) or "") and id(value) not in self.things:
            inner = value.__dict__
            for each in {*code.co_names} & inner.keys():
                if inner[each] is not value and (id(inner), each) not in self.globals:
                    self.globals[id(inner), each] = (f"{path}.{each}", inner, each)
                    if not isinstance(inner[each], types.ModuleType):
                        self._waiting.append((f"{path}.{each}", inner[each]))
                    else:
                        self._look_at_named(code, f"{path}.{each}", inner, each)


def homes_of(value: Any) -> Iterator[Any]:
    """Yield what holds the attributes of an object, by name."""
    with contextlib.suppress(AttributeError):
        yield object.__getattribute__(value, "__dict__")
    slots = Slots(value)
    if slots.keys():
        yield slots


def _is_code(value: Any) -> bool:
    """Return whether a member of a class is run by its name."""
    kinds = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
    return isinstance(value, kinds) or isinstance(getattr(value, "__wrapped__", None), types.FunctionType)


def _behind(value: Any) -> tuple[Any, ...]:
    """Return what a value of Python's own leads to."""
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, weakref.ref):
        return (value(),)
    if type(value) is functools._lru_cache_wrapper:
        return (value.__wrapped__,)
    return ()
