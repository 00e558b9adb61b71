"""What the Python code of a forward reads and leaves behind while it is traced.

Note [What was read]
    A trace has the numbers in it that the forward found on modules, on the objects they hold, in the globals and
    closures of the model's code. While it runs, every attribute of a module that is read is noted, and every attribute
    of an object that was read so. Names of globals are taken from the code that runs: of functions that run an
    operator, of those they name, and of the modules' own methods. Later all that is compared before every call
    (`guards.py`).

Note [What is left behind]
    What a forward puts on its modules is compared with what was there before. Tensors and constants that it writes
    without having read what was there are results of the call like those it returns, and are put there after every
    call; so is what it appends to a list. A tensor that depends on nothing but constants, and that is put in the place
    of None, is made by every call and need not be there. A flag that is read and set ("ready") is put there too; the
    next call has read another value, and is captured anew. All else would carry something from one call to the next
    that a captured call does not see, so it is refused.
"""

import contextlib
import dataclasses
import dis
import gc
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memfit.capture.guards import ANY_TENSOR, Guards, Place
from memfit.capture.outputs import OutputTemplate, is_constant, take_apart
from memfit.capture.record import in_library
from memfit.tensors import tensors_in

_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith("hooks"))
_OF_RECURRENT = {"_flat_weights", "_flat_weight_refs"}  # which follow the parameters
_OWN = frozenset(vars(nn.Module())) - _HOOKS | _OF_RECURRENT | {"forward", "__dict__", "__class__"}  # not guarded here
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_HEAP_TYPE = 1 << 9  # of `__flags__`: a class written in Python
_FOREIGN = ("torch", "numpy", "builtins", "enum", "typing", "functools", "threading", "logging", "memfit", "_io")
_MOST_ELEMENTS = 10_000  # of a container that is looked into
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]

IsKnown = Callable[[torch.Tensor], bool]  # whether a tensor depends on nothing but constants


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """Something a forward leaves behind, with its tensors taken out."""

    home: Any  # the attributes of an object, or a list
    name: str | None  # None: is appended to the list
    template: OutputTemplate

    def shifted(self, count: int) -> "Effect":
        """The same with its tensors behind `count` others."""
        return dataclasses.replace(self, template=self.template.shifted(count))

    def apply(self, tensors: list[torch.Tensor]) -> None:
        """Leave it behind again."""
        value = self.template.rebuild(tensors)
        if self.name is None:
            self.home.extend(value)
        else:
            self.home[self.name] = value


@dataclasses.dataclass(slots=True)
class _Watched:
    """An object whose attributes are noted when they are read."""

    path: str
    home: dict[str, Any]
    before: dict[str, Any]  # its attributes before the forward


class Reads:
    """Notes what the forward of a model reads, see Note [What was read]."""

    def __init__(self, model: nn.Module) -> None:
        self._thread = threading.get_ident()
        self._watched: dict[int, _Watched] = {}
        self._kept: list[Any] = []  # keeps identities
        self._looked_into: set[int] = set()
        self._is_following = False
        self._patched: dict[type, Any] = {}
        self._places: dict[tuple[int, str], Place] = {}
        self._containers: dict[int, tuple[str, Any, tuple[Any, ...]]] = {}
        self._codes: dict[types.CodeType, dict[str, Any]] = {}
        self._generators: list[tuple[str, Any, str]] = []
        for path, module in model.named_modules(remove_duplicate=True):
            self._watch(path, module)
        self._methods = [method for module in model.modules() for method in _methods(type(module))]

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Note what is read meanwhile."""
        self._is_following = True
        for each in {nn.Module, *(_defining(type(thing)) for thing in self._kept)} - {object}:
            self._patch(each)
        try:
            yield
        finally:
            for cls, original in self._patched.items():
                if original is None:
                    del cls.__getattribute__
                else:
                    _read_by(cls, original)
            self._patched.clear()
            self._is_following = False

    def ran(self, frame: types.FrameType) -> None:
        """Note that a function runs an operator."""
        if frame.f_code not in self._codes and not in_library(frame.f_code.co_filename):
            self._codes[frame.f_code] = frame.f_globals

    def guards(self) -> Guards:
        """All that was read, to be compared with what is there later."""
        self._note_globals()
        containers = [
            (path, container, tuple(ANY_TENSOR if isinstance(each, torch.Tensor) else each for each in content))
            for path, container, content in self._containers.values()
            if len(content) <= _MOST_ELEMENTS
        ]
        return Guards(list(self._places.values()), containers)

    def restore(self) -> None:
        """Put back what the forward has left on objects and in lists; modules are put back by their snapshot."""
        for thing in self._kept:
            watched = self._watched.get(id(thing))
            if watched is not None and not isinstance(thing, nn.Module):
                watched.home.clear()
                watched.home.update(watched.before)
        for _, container, content in self._containers.values():
            if isinstance(container, list):
                container[:] = content

    def effects(self, is_known: IsKnown) -> tuple[list[Effect], list[torch.Tensor]]:
        """What the forward has left behind, and its tensors; ValueError if a call cannot leave it behind again."""
        tensors: list[torch.Tensor] = []
        found: list[Effect] = []
        for watched in list(self._watched.values()):
            for name, value in watched.home.items():
                old = watched.before.get(name, _ABSENT)
                if value is not old and name not in _OWN and not _same_constant(value, old):
                    found += self._assigned(watched, name, old, value, is_known, tensors)
            for name in watched.before.keys() - watched.home.keys():
                raise ValueError(f"the forward deletes the attribute {watched.path}.{name}".replace(" .", " "))
        for path, container, content in self._containers.values():
            found += _appended(path, container, content, tensors)
        for path, generator, state in self._generators:
            if _state(generator) != state:
                raise ValueError(f"the forward draws from {path}, a generator of Python's or NumPy's; draw with torch")
        return found, tensors

    def _assigned(
        self, watched: _Watched, name: str, old: Any, value: Any, is_known: IsKnown, tensors: list[torch.Tensor]
    ) -> Iterator[Effect]:
        path = f"{watched.path}.{name}".lstrip(".")
        was_read = (id(watched.home), name) in self._places
        if was_read:
            held = tensors_in(value)
            if old is None and held and all(map(is_known, held)):
                del self._places[id(watched.home), name]  # made by every call, see Note [What is left behind]
                return
            if not isinstance(value, bool | str | None):
                raise ValueError(
                    f"the forward reads {path} and writes it, so that it carries something from one call to the next "
                    "that a captured call would not see; keep it in a buffer"
                )
        yield Effect(home=watched.home, name=name, template=_template(path, value, tensors))

    def _watch(self, path: str, thing: Any) -> None:
        home = thing.__dict__
        self._watched[id(thing)] = _Watched(path, home, dict(home))
        self._kept.append(thing)

    def _patch(self, cls: type) -> None:
        if cls in self._patched or not self._is_following:
            return
        original = cls.__dict__.get("__getattribute__")
        read: Any = cls.__getattribute__
        noted = self._noted

        def recording(instance: Any, name: str) -> Any:
            value = read(instance, name)
            noted(instance, name, value)
            return value

        try:
            _read_by(cls, recording)
        except TypeError:  # not a class of Python's
            return
        self._patched[cls] = original

    def _noted(self, instance: Any, name: str, value: Any) -> None:
        watched = self._watched.get(id(instance))
        if watched is None or name in _OWN or threading.get_ident() != self._thread:
            return
        home: Mapping[str, Any] = watched.home
        if name not in home:  # of the class: constants alone, methods are what they are
            defining = next((each for each in type(instance).__mro__ if name in each.__dict__), None)
            if defining is None or defining.__module__.startswith("torch.") or not is_constant(defining.__dict__[name]):
                return
            home = defining.__dict__
        elif watched.before.get(name, _ABSENT) is not value:
            return  # written by this forward
        self._note(f"{watched.path}.{name}".lstrip("."), home, name, value)

    def _note(self, path: str, home: Mapping[str, Any], name: str, value: Any) -> None:
        key = (id(home), name)
        if key in self._places:
            return
        if name not in _HOOKS:
            self._places[key] = Place(path, home, name, value)
        self._look_into(path, value)

    def _look_into(self, path: str, value: Any) -> None:
        """Note what is in containers, and what objects hold."""
        if isinstance(value, _CONTAINERS):
            if id(value) not in self._looked_into:
                self._looked_into.add(id(value))
                self._kept.append(value)
                elements = tuple(value.values()) if isinstance(value, dict) else tuple(value)
                if not isinstance(value, tuple | frozenset):  # which cannot change
                    self._containers[id(value)] = (path, value, elements)
                for each in elements if len(elements) <= _MOST_ELEMENTS else ():
                    self._look_into(f"{path}[...]", each)
        elif _is_generator(value):
            self._generators.append((path, value, _state(value)))
        elif _is_object(value) and id(value) not in self._watched:
            self._watch(path, value)
            self._patch(type(value))

    def _note_globals(self) -> None:
        """See Note [What was read]."""
        for code, around in self._codes.items():
            _check_no_writes(code, around)
        waiting = [*self._codes.items(), *((each.__code__, each.__globals__) for each in self._methods)]
        seen = set()
        while waiting:
            code, around = waiting.pop()
            if code in seen or in_library(code.co_filename):
                continue
            seen.add(code)
            waiting += [(each, around) for each in code.co_consts if isinstance(each, types.CodeType)]
            for name in code.co_names:
                if name in around:
                    waiting += self._note_global(code, around, name)
            if set(code.co_freevars) - {"__class__"}:
                self._note_closures(code)

    def _note_global(
        self, code: types.CodeType, around: dict[str, Any], name: str
    ) -> list[tuple[types.CodeType, dict[str, Any]]]:
        """Note a global, and what the code may read of it; functions are looked at in their turn."""
        value = around[name]
        if isinstance(value, types.FunctionType):
            return [(value.__code__, value.__globals__)]
        if _is_plain(value):
            self._note(name, around, name, value)
        elif (
            isinstance(value, types.ModuleType) and not in_library(str(getattr(value, "__file__", "")))
        ) or _is_object(value):
            home = value.__dict__
            for each in set(code.co_names) & home.keys():
                if _is_plain(home[each]):
                    self._note(f"{name}.{each}", home, each, home[each])
        return []

    def _note_closures(self, code: types.CodeType) -> None:
        for function in gc.get_referrers(code):
            if not isinstance(function, types.FunctionType) or function.__code__ is not code:
                continue
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # an empty cell
                    if _is_plain(cell.cell_contents):
                        home = _Cell(cell)
                        self._kept.append(home)
                        self._note(f"{code.co_name}.{name}", home, name, cell.cell_contents)  # type: ignore[arg-type]


def _check_no_writes(code: types.CodeType, around: Mapping[str, Any]) -> None:
    """Refuse code that writes globals, or names functions that do."""
    named = [around.get(name) for name in code.co_names]
    called = [each.__code__ for each in named if isinstance(each, types.FunctionType)]
    for each in (code, *called):
        if _STORE_GLOBAL in each.co_code[::2] and not in_library(each.co_filename):
            raise ValueError(f"{each.co_name} writes a global, which a captured call would not do again")


class _Cell:
    """A variable of a closure, to be read as others are."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, _name: str) -> Any:
        return self._cell.cell_contents


_ABSENT = object()


def _appended(path: str, container: Any, before: tuple[Any, ...], tensors: list[torch.Tensor]) -> Iterator[Effect]:
    """What was appended to a list."""
    now = tuple(container.values()) if isinstance(container, dict) else tuple(container)
    if len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True)):
        return
    is_longer = len(now) > len(before) and all(one is other for one, other in zip(now, before, strict=False))
    if not isinstance(container, list) or not is_longer:
        raise ValueError(
            f"the forward changes what is in {path}, which a captured call would not do again; return it instead"
        )
    tail = list(now[len(before) :])
    yield Effect(home=container, name=None, template=_template(path, tail, tensors))


def _template(path: str, value: Any, tensors: list[torch.Tensor]) -> OutputTemplate:
    """A value with its tensors taken out, which are put behind those that are there."""
    try:
        own, template = take_apart(value)
    except ValueError:
        raise ValueError(
            f"the forward leaves a {type(value).__name__} in {path}, which a captured call cannot make again"
        ) from None
    template = template.shifted(len(tensors))
    tensors += own
    return template


def _same_constant(one: Any, other: Any) -> bool:
    return is_constant(one) and type(one) is type(other) and bool(one == other)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a constant, or a container of them."""
    if isinstance(value, _CONTAINERS):
        elements = value.values() if isinstance(value, dict) else value
        return len(value) <= _MOST_ELEMENTS and all(map(_is_plain, elements))
    return is_constant(value) and not isinstance(value, type)


def _is_object(value: Any) -> bool:
    """Return whether a value has attributes of its own that a model may read."""
    cls = type(value)
    return (
        hasattr(value, "__dict__")
        and bool(cls.__flags__ & _HEAP_TYPE)
        and not isinstance(value, nn.Module | torch.Tensor | type | types.ModuleType)
        and cls.__module__.partition(".")[0] not in _FOREIGN
    )


def _is_generator(value: Any) -> bool:
    kinds: tuple[Any, ...] = (random.Random,)
    if "numpy" in sys.modules:
        kinds += (sys.modules["numpy"].random.Generator, sys.modules["numpy"].random.RandomState)
    return isinstance(value, kinds)


def _state(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return str(generator.getstate())
    return str(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())


def _methods(cls: type) -> list[types.FunctionType]:
    """The functions of a class that torch has not written."""
    return [
        each
        for base in cls.__mro__
        if not base.__module__.startswith(("torch.", "builtins"))
        for each in vars(base).values()
        if isinstance(each, types.FunctionType)
    ]


def _read_by(cls: Any, function: Callable[[Any, str], Any]) -> None:
    """Let a function read the attributes of a class's instances."""
    cls.__getattribute__ = function


def _defining(cls: type) -> type:
    """The class that says how attributes of another are read."""
    return next(each for each in cls.__mro__ if "__getattribute__" in each.__dict__ or each is object)
