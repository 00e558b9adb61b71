"""Note values that a forward may read, with what is in them."""

import contextlib
import contextvars
import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memfit.capture.guards import ANY_TENSOR, Place, elements_of
from memfit.capture.held import (
    CONTAINERS,
    MOST_ELEMENTS,
    Bytes,
    Cell,
    FunctionParts,
    Slots,
    Variable,
    attributes_of,
    generator_state,
    is_array,
    is_foreign,
    is_generator,
    is_object,
    is_plain,
    is_shared,
)
from memfit.capture.numbers import Follower

HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith("hooks"))
_DEEPEST = 3  # objects in objects that nobody watches

Container = tuple[str, Any, tuple[Any, ...]]  # a path, and what was in there


class Notes:
    """Places of values, what was in containers, and states of generators."""

    def __init__(self, watch: Callable[[str, Any], bool], is_part: Callable[[nn.Module], bool]) -> None:
        """`watch` follows the attributes of an object as they are read, and says whether it can.

        `is_part` says whether a module is a part of the model, whose attributes are followed anyway.
        """
        self.functions: list[types.FunctionType] = []  # whose code is to be looked at
        self.closed: set[types.CodeType] = set()  # of functions whose closures were looked into
        self._is_part = is_part
        self.places: dict[tuple[int, str], Place] = {}
        self.containers: dict[int, Container] = {}
        self.generators: list[tuple[str, Any, str]] = []
        self._watch = watch
        self._kept: list[Any] = []  # keeps identities
        self._looked_into: set[int] = set()

    def take_functions(self) -> list[types.FunctionType]:
        """Return the functions that were found since the last time."""
        found = self.functions[:]
        self.functions.clear()
        return found

    def note(self, path: str, home: Mapping[str, Any], name: str, value: Any) -> None:
        """Note a value by its home, and what it holds."""
        key = (id(home), name)
        if key in self.places or type(value) is Follower:  # which is not compared later
            return
        self._kept.append(home)
        if name in HOOKS:
            self._look_into_container(path, value, deep=False)  # what hooks hold is theirs
            return
        self.places[key] = Place(path, home, name, value)
        self.look_into(path, value)

    def look_into(self, path: str, value: Any) -> None:
        """Note what is in containers, and what objects hold."""
        if isinstance(value, CONTAINERS):
            self._look_into_container(path, value)
        elif is_generator(value):
            self.generators.append((path, value, generator_state(value)))
        elif isinstance(value, weakref.ref):
            self.look_into(path, value())
        elif isinstance(value, types.MethodType):
            self.look_into(f"{path}.__self__", value.__self__)
        elif isinstance(value, types.FunctionType):
            self._look_into_function(path, value)
        elif isinstance(value, nn.Module):
            if not self._is_part(value):
                self.note_object(path, value)
        elif isinstance(value, contextvars.ContextVar):
            read: Any = Variable(value)
            self.note(path, read, path, read[path])
        elif isinstance(value, functools.partial):
            self.look_into(f"{path}.args", value.args)
            self.look_into(f"{path}.keywords", value.keywords)
        elif hasattr(type(value), "__next__"):
            raise ValueError(f"the forward reads {path}, an iterator, which a captured call would not move on")
        elif is_array(value) or is_shared(value):
            content: Any = Bytes(value)
            self.note(path, content, path, content[path])
        elif is_object(value) and not self._watch(path, value):
            self.note_all(path, attributes_of(value))

    def _look_into_function(self, path: str, function: types.FunctionType) -> None:
        """Note what a function has closed over, and leave its code to be looked at."""
        if is_foreign(function.__code__.co_filename) or not self._is_new(function):
            return
        self.functions.append(function)
        self.note_function(path, function)
        self.closed.add(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                value = cell.cell_contents
                home: Any = Cell(cell)
                if is_plain(value):
                    self.note(f"{path}.{name}", home, name, value)
                else:
                    self.look_into(f"{path}.{name}", value)

    def note_function(self, path: str, function: types.FunctionType) -> None:
        """Note what a function takes by default, and that its code is its own."""
        parts: Any = FunctionParts(function)
        for name in parts.NAMES:
            value = parts[name]
            self.note(f"{path}.{name}", parts, name, value)

    def note_defaults(self, path: str, function: types.FunctionType) -> None:
        """Note what a function takes by default, if it does: there are many methods."""
        parts: Any = FunctionParts(function)
        for name in ("__defaults__", "__kwdefaults__"):
            if parts[name] is not None:
                self.note(f"{path}.{name}", parts, name, parts[name])

    def _look_into_container(self, path: str, container: Any, *, deep: bool = True) -> None:
        if not self._is_new(container):
            return
        elements = elements_of(container)
        if not isinstance(container, tuple | frozenset):  # which cannot change
            self.containers[id(container)] = (path, container, elements)
        for each in elements if deep and len(elements) <= MOST_ELEMENTS else ():
            self.look_into(f"{path}[...]", each)

    def note_all(self, path: str, home: Any) -> None:
        """Note everything an object holds."""
        if isinstance(home, Slots) or self._is_new(home):
            for name in list(home.keys()):
                self.note(f"{path}.{name}".lstrip("."), home, name, home[name])

    def note_object(self, path: str, thing: Any, depth: int = _DEEPEST) -> None:
        """Note the constants that an object holds, and those of objects in it."""
        home = attributes_of(thing)
        for name in list(home.keys()):
            value = home[name]
            if is_plain(value):
                self.note(f"{path}.{name}", home, name, value)
            elif is_object(value) and depth > 1:
                self.note_object(f"{path}.{name}", value, depth - 1)

    def compared(self) -> list[Container]:
        """Return the containers to be compared later; tensors in them may be others."""
        return [
            (path, container, tuple(ANY_TENSOR if isinstance(each, torch.Tensor) else each for each in content))
            for path, container, content in self.containers.values()
            if len(content) <= MOST_ELEMENTS
        ]

    def _is_new(self, thing: Any) -> bool:
        is_new = id(thing) not in self._looked_into
        self._looked_into.add(id(thing))
        self._kept.append(thing)
        return is_new
