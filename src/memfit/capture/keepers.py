"""Remember what is in a thing that may be changed, by kind, so that it can be put back.

What was not changed is not written: others may look whether it was.
"""

import array
import contextvars
import copy
import ctypes
import io
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from operator import is_
from typing import Any

import torch

from memfit.capture.held import generator_state, is_array, is_generator, is_shared

PutBack = Callable[[], None]

_ABSENT = object()
_PYTHONS = ("builtins", "itertools", "collections", "_collections")  # whose iterators say where they stand


class NotPutBack(Exception):
    """An iterator of some type was moved on, and cannot be moved back."""


def put_back_of(value: Any) -> PutBack | None:
    """Return what puts back a container, a generator, an array or an iterator; None for all else."""
    for kind, keeper in _KEEPERS:
        if isinstance(value, kind):
            return keeper(value)
    if is_generator(value):
        return _of_generator(value)
    if is_shared(value) or is_array(value):
        return _of_array(value.get_obj() if is_shared(value) else value)
    return _of_iterator(value) if hasattr(type(value), "__next__") else None


def of_attributes(home: Any) -> PutBack:
    """Remember attributes in a dictionary, or in slots."""
    return _of_dict(home) if isinstance(home, dict) else _of_slots(home)


def of_class(cls: type) -> PutBack:
    """Remember what is in a class."""
    before = _members(cls)

    def put_back() -> None:
        now = _members(cls)
        for name in now.keys() - before.keys():
            type.__delattr__(cls, name)
        for name, value in before.items():
            if now.get(name, _ABSENT) is not value:
                type.__setattr__(cls, name, value)

    return put_back


def of_cell(cell: types.CellType) -> PutBack:
    """Remember a variable of a closure."""
    before = _content_of(cell)

    def put_back() -> None:
        if _content_of(cell) is not before and before is not _ABSENT:
            cell.cell_contents = before

    return put_back


def of_global(home: dict[str, Any], name: str) -> PutBack:
    """Remember a global."""
    before = home[name]

    def put_back() -> None:
        if home.get(name, _ABSENT) is not before:
            home[name] = before

    return put_back


def _of_dict(value: dict[Any, Any]) -> PutBack:
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    before = {**dict(dict.items(value))}

    def put_back() -> None:
        now = dict(dict.items(value))
        if len(now) == len(before) and all(map(is_, now, before)) and all(map(is_, now.values(), before.values())):
            return
        kind.clear(value)
        for key, each in before.items():
            kind.__setitem__(value, key, each)

    return put_back


def _of_list(value: list[Any]) -> PutBack:
    before = [*list.__iter__(value)]

    def put_back() -> None:
        if not _are_same([*list.__iter__(value)], before):
            list.__setitem__(value, slice(None), before)

    return put_back


def _of_deque(value: deque[Any]) -> PutBack:
    before = [*deque.__iter__(value)]

    def put_back() -> None:
        if not _are_same([*deque.__iter__(value)], before):
            deque.clear(value)
            deque.extend(value, before)

    return put_back


def _of_set(value: set[Any]) -> PutBack:
    before = set.copy(value)

    def put_back() -> None:
        if {*map(id, set.__iter__(value))} != {*map(id, before)}:
            set.clear(value)
            set.update(value, before)

    return put_back


def _of_slots(slots: Any) -> PutBack:
    before = slots.read()

    def put_back() -> None:
        now = slots.read()
        for name in now.keys() - before.keys():
            slots.delete(name)
        for name, value in before.items():
            if now.get(name, _ABSENT) is not value:
                slots[name] = value

    return put_back


def _of_torch_generator(generator: torch.Generator) -> PutBack:
    before = bytearray(generator.get_state().numpy().tobytes())

    def put_back() -> None:
        generator.set_state(torch.frombuffer(before, dtype=torch.uint8))

    return put_back


def _of_generator(generator: Any) -> PutBack:
    """Remember the state of a generator of Python's or NumPy's."""
    if isinstance(generator, random.SystemRandom):
        return lambda: None
    words = generator_state(generator)
    if isinstance(generator, random.Random):
        state, write = generator.getstate(), generator.setstate
    elif hasattr(generator, "bit_generator"):
        numbers = generator.bit_generator
        state, write = copy.deepcopy(numbers.state), lambda state: setattr(numbers, "state", state)
    else:
        state, write = generator.get_state(legacy=False), generator.set_state

    def put_back() -> None:
        if generator_state(generator) != words:
            write(state)

    return put_back


def _of_array(value: Any) -> PutBack | None:
    """Remember the content of an array of NumPy's or Python's; None if it cannot be written."""
    if isinstance(value, bytearray | array.array):
        return _of_growing(value)
    if isinstance(value, ctypes.Structure | ctypes.Array) or not hasattr(value, "flags"):
        return _of_c(value)
    if not value.flags.writeable:
        return None
    before = value.copy()

    def put_back() -> None:
        if value.dtype.hasobject or value.tobytes() != before.tobytes():
            value[...] = before

    return put_back


def _of_growing(value: Any) -> PutBack:
    before = value[:]

    def put_back() -> None:
        if value != before:
            value[:] = before

    return put_back


def _of_c(value: Any) -> PutBack:
    before = bytes(value)

    def put_back() -> None:
        ctypes.memmove(ctypes.addressof(value), before, len(before))

    return put_back


def _of_iterator(iterator: Any) -> PutBack | None:
    """Remember where one of Python's iterators stands; None where that cannot be told."""
    if isinstance(iterator, io.IOBase):
        return None
    before = _stand_of(iterator)
    state = iterator.__reduce__()[2:] if before and hasattr(iterator, "__setstate__") else ()

    def put_back() -> None:
        if state and _stand_of(iterator) != before:
            iterator.__setstate__(state[0])
        if _stand_of(iterator) != before:  # of a generator, a count, or a cycle
            raise NotPutBack(type(iterator).__name__)

    return put_back if before else None


def _stand_of(value: Any) -> Any:
    """Return what tells where an iterator stands, with those that it goes through; () where that cannot be told."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return ("ended",) if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
    if isinstance(value, tuple | list):
        return tuple([_stand_of(each) for each in value])
    if not hasattr(type(value), "__next__"):
        return value if isinstance(value, int | float | str) else id(value)
    if type(value).__module__ not in _PYTHONS:  # somebody's own: its attributes tell, and pickling it may do anything
        return ()
    try:
        return tuple([_stand_of(each) for each in value.__reduce__()[1:]])
    except TypeError:
        return ()


def _of_variable(variable: contextvars.ContextVar[Any]) -> PutBack:
    before = variable.get(_ABSENT)

    def put_back() -> None:
        if before is not _ABSENT and variable.get(_ABSENT) is not before:
            variable.set(before)

    return put_back


def _members(cls: type) -> dict[str, Any]:
    hidden = ("__dict__", "__weakref__", "__doc__", "__annotations__", "__getattribute__")
    return {name: value for name, value in cls.__dict__.items() if name not in hidden}


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _ABSENT


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


_KEEPERS: tuple[tuple[Any, Callable[[Any], PutBack]], ...] = (
    (dict, _of_dict),
    (list, _of_list),
    (deque, _of_deque),
    (set, _of_set),
    (torch.Generator, _of_torch_generator),
    (contextvars.ContextVar, _of_variable),
)
