"""Tell kinds of Python values apart that a model may read, and read those that have no dictionary as if they had."""

import array
import contextvars
import ctypes
import os
import random
import sys
import threading
import types
from collections import UserDict, UserList, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from memfit.capture.outputs import is_constant
from memfit.capture.record import in_library

CONTAINERS = (list, tuple, dict, set, frozenset, deque)
MOST_ELEMENTS = 10_000  # of a container that is looked into
_HEAP_TYPE = 1 << 9  # of `__flags__`: a class written in Python
_FOREIGN = ("torch", "numpy", "builtins", "enum", "typing", "functools", "threading", "logging", "memfit", "_io")
_SIMPLE_C: Any = ctypes.c_int.__mro__[1]
_READ_WHOLE = (types.SimpleNamespace, threading.local, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_PYTHON = os.path.dirname(os.__file__) + os.sep


def is_plain(value: Any) -> bool:
    """Return whether a value is a constant, or a container of them."""
    if isinstance(value, CONTAINERS):
        elements = values_in(value)
        return len(elements) <= MOST_ELEMENTS and all(map(is_plain, elements))
    return is_constant(value) and not isinstance(value, type)


def is_collected(value: Any) -> bool:
    """Return whether a value is a list of tensors and constants, as forwards append to."""
    if not isinstance(value, list):
        return False
    return all(isinstance(each, torch.Tensor) or is_constant(each) for each in values_in(value))


def values_in(container: Any) -> tuple[Any, ...]:
    """Return what a container holds; of a dictionary the values.

    A class of somebody's own may make its elements when it is asked for them (transformers' tables of models import
    every model), so only what really lies in it is looked at.
    """
    if isinstance(container, dict):
        return tuple(dict.values(container))
    kind: Any = next(each for each in CONTAINERS if isinstance(container, each))
    return tuple(kind.__iter__(container))


def is_object(value: Any) -> bool:
    """Return whether a value has attributes of its own that a model may read."""
    cls = type(value)
    has_attributes = hasattr(value, "__dict__") or hasattr(cls, "__slots__")
    is_one = is_own_class(cls) and not isinstance(value, nn.Module | torch.Tensor | type | types.ModuleType)
    return (has_attributes and is_one) or isinstance(value, _READ_WHOLE)


def is_own_class(cls: type) -> bool:
    """Return whether a class is neither Python's nor torch's."""
    return bool(cls.__flags__ & _HEAP_TYPE) and cls.__module__.partition(".")[0] not in _FOREIGN


def own_kind(values: Iterable[Any]) -> str:
    """Return what a tensor among values is that no captured call is given; empty if all are dense ones of torch's."""
    for each in values:
        if isinstance(each, torch.Tensor):
            if each.layout in _SPARSE:
                return f"is sparse ({each.layout})"
            if is_own_class(type(each)) and not issubclass(type(each), nn.Parameter | nn.Buffer):
                return f"is a {type(each).__name__}, a subclass of torch.Tensor"
    return ""


def is_standard(cls: type) -> bool:
    """Return whether a class is of Python's library, whose objects may belong to threads."""
    return cls.__module__.partition(".")[0] in sys.stdlib_module_names and cls.__module__ != "__main__"


def has_attributes(value: Any) -> bool:
    """Return whether a value has attributes that a forward may change."""
    if isinstance(value, (nn.Module, UserDict, UserList, *_READ_WHOLE)):
        return True
    return is_own_class(type(value)) and not is_standard(type(value)) and not isinstance(value, type)


def is_foreign(filename: str) -> bool:
    """Return whether a file is torch's, memfit's or Python's own."""
    return in_library(filename) or (filename.startswith(_PYTHON) and "site-packages" not in filename)


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy's or Python's."""
    if isinstance(value, bytearray | array.array | ctypes.Array | _SIMPLE_C):
        return True
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray)


def is_shared(value: Any) -> bool:
    """Return whether a value is one of multiprocessing's that processes share."""
    shared = sys.modules.get("multiprocessing.sharedctypes")
    return shared is not None and isinstance(value, shared.SynchronizedBase)


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator of Python's or NumPy's."""
    kinds: tuple[Any, ...] = (random.Random,)
    if "numpy" in sys.modules:
        kinds += (sys.modules["numpy"].random.Generator, sys.modules["numpy"].random.RandomState)
    return isinstance(value, kinds)


def generator_state(generator: Any) -> str:
    """Write the state of a generator of Python's or NumPy's."""
    if isinstance(generator, random.Random):
        return str(generator.getstate())
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    return str(_without_arrays(bits.state))


def _without_arrays(state: Any) -> Any:
    """Write arrays as their bytes: NumPy takes a hundred times as long to write their numbers."""
    if isinstance(state, dict):
        return {name: _without_arrays(value) for name, value in state.items()}
    return state.tobytes() if is_array(state) else state


def attributes_of(thing: Any) -> Any:
    """Return the attributes of an object by name."""
    return thing.__dict__ if hasattr(thing, "__dict__") else Slots(thing)


class Slots:
    """Read the attributes of an object without a dictionary by name."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def keys(self) -> list[str]:
        """Return the names that have a value."""
        named = (getattr(each, "__slots__", ()) for each in type(self._thing).__mro__)
        slots = [name for each in named for name in ((each,) if isinstance(each, str) else each)]
        return [name for name in slots if hasattr(self._thing, name) and not name.startswith("__")]

    def __getitem__(self, name: str) -> Any:
        return getattr(self._thing, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._thing, name, value)

    def read(self) -> dict[str, Any]:
        """Return all values by name."""
        return {name: self[name] for name in self.keys()}

    def delete(self, name: str) -> None:
        """Take a value away."""
        object.__delattr__(self._thing, name)


class FunctionParts:
    """Read what belongs to a function by name."""

    NAMES = ("__code__", "__defaults__", "__kwdefaults__")

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function

    def __getitem__(self, name: str) -> Any:
        return getattr(self._function, name)

    def get(self, name: str, _absent: Any = None) -> Any:
        """Return the same: these are always there."""
        return self[name]


class Cell:
    """Read a variable of a closure by any name."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, _name: str) -> Any:
        return self._cell.cell_contents


class Membership:
    """Read whether a container has something, by what that is."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def __getitem__(self, name: str) -> bool:
        return name in self._container

    def get(self, name: str, _absent: Any = None) -> bool:
        """Return the same: there is always an answer."""
        return self[name]


class Variable:
    """Read a context variable by any name."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable = variable

    def __getitem__(self, _name: str) -> Any:
        return self._variable.get(None)


class Bytes:
    """Read the content of an array, or of a value that processes share, by any name."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, _name: str) -> Any:
        if hasattr(self._array, "get_obj"):
            return bytes(self._array.get_obj())
        return self._array.tobytes() if hasattr(self._array, "tobytes") else bytes(self._array)
