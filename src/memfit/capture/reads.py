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
import os
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from memfit.capture.guards import ANY_TENSOR, Guards, Place, elements_of
from memfit.capture.hooks import HOOKS_OF_ALL
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
_PYTHON = os.path.dirname(os.__file__) + os.sep
_ENVIRONMENT = "os.environ"
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
        self._methods: list[types.FunctionType] = []
        self._seen_codes: set[types.CodeType] = set()
        self._forwards = [module.__dict__ for module in model.modules() if module is not model]
        for path, module in model.named_modules(remove_duplicate=True):
            self._watch(path, module)
        for cls in {each for module in model.modules() for each in type(module).__mro__ if _is_own_class(each)}:
            self._note_class(cls)
        self._note_code([(each.__code__, each.__globals__) for each in self._methods])

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
        for name in HOOKS_OF_ALL:
            hooks = getattr(torch_module, name)
            containers.append((name, hooks, elements_of(hooks)))
        return Guards(list(self._places.values()), containers, self._forwards)

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
            if path != _ENVIRONMENT:  # which libraries write when they are first used
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
        if watched is None or threading.get_ident() != self._thread:
            return
        if name == "__dict__" and not in_library(sys._getframe(2).f_code.co_filename):
            for each in watched.before.keys() - _OWN:  # which of them are read is not seen
                self._note(f"{watched.path}.{each}".lstrip("."), watched.home, each, watched.before[each])
        if name in _OWN:
            return
        path = f"{watched.path}.{name}".lstrip(".")
        if isinstance(value, torch.Generator):
            raise ValueError(
                f"the forward reads {path}, a generator of its own, which a captured call does not draw "
                "from; draw from torch's own generator"
            )
        home: Mapping[str, Any] = watched.home
        if name not in home:  # of the class: constants alone, methods are what they are
            defining = next((each for each in type(instance).__mro__ if name in each.__dict__), None)
            if defining is None or defining.__module__.startswith("torch.") or not is_constant(defining.__dict__[name]):
                return
            home = defining.__dict__
        elif watched.before.get(name, _ABSENT) is not value:
            return  # written by this forward
        self._note(path, home, name, value)

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
                elements = elements_of(value)
                if not isinstance(value, tuple | frozenset):  # which cannot change
                    self._containers[id(value)] = (path, value, elements)
                for each in elements if len(elements) <= _MOST_ELEMENTS else ():
                    self._look_into(f"{path}[...]", each)
        elif _is_generator(value):
            self._generators.append((path, value, _state(value)))
        elif isinstance(value, weakref.ref):
            self._look_into(path, value())
        elif hasattr(type(value), "__next__"):
            raise ValueError(f"the forward reads {path}, an iterator, which a captured call would not move on")
        elif _is_array(value):
            home: Any = _Bytes(value)
            self._kept.append(home)
            self._places[id(home), path] = Place(path, home, path, home[path])
        elif isinstance(value, types.SimpleNamespace):
            self._note_all(path, value.__dict__)
        elif _is_object(value) and id(value) not in self._watched:
            if hasattr(value, "__dict__"):
                self._watch(path, value)
                self._patch(type(value))
            else:
                self._note_all(path, _Slots(value))

    def _note_all(self, path: str, home: Any) -> None:
        """Note everything an object holds."""
        if id(home) in self._looked_into:
            return
        self._looked_into.add(id(home))
        self._kept.append(home)
        for name in list(home.keys()):
            self._note(f"{path}.{name}".lstrip("."), home, name, home[name])

    def _note_class(self, cls: type) -> None:
        """Note what a class of the user's holds, and its methods."""
        home = cls.__dict__
        self._kept.append(home)
        for name, value in home.items():
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                self._methods.append(function)
            if isinstance(function, types.FunctionType) or (_is_plain(value) and not name.startswith("__")):
                self._note(f"{cls.__name__}.{name}", home, name, value)

    def _note_globals(self) -> None:
        """See Note [What was read]."""
        for code, around in self._codes.items():
            _check_no_writes(code, around)
        self._note_code(list(self._codes.items()))

    def _note_code(self, waiting: list[tuple[types.CodeType, dict[str, Any]]]) -> None:
        while waiting:
            code, around = waiting.pop()
            if code in self._seen_codes or _is_foreign(code.co_filename):
                continue
            self._seen_codes.add(code)
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
            self._note(name, around, name, value)
            self._note_all(name, value.__dict__)
            return [(value.__code__, value.__globals__)]
        if _is_generator(value):
            self._generators.append((name, value, _state(value)))
        elif isinstance(value, types.ModuleType):
            self._note_module(code, name, value)
        elif isinstance(value, type):
            if _is_own_class(value):
                first = len(self._methods)
                self._note_class(value)
                return [(each.__code__, each.__globals__) for each in self._methods[first:]]
        elif _is_plain(value):
            self._note(name, around, name, value)
        elif _is_object(value) or isinstance(value, types.SimpleNamespace):
            self._note_object(name, value)
        return []

    def _note_module(self, code: types.CodeType, name: str, module: types.ModuleType) -> None:
        """Note what code may read of a module."""
        if module is os and {"environ", "getenv"} & {*code.co_names}:
            self._look_into(_ENVIRONMENT, vars(os.environ)["_data"])
        home = module.__dict__
        for each in set(code.co_names) & home.keys():
            value = home[each]
            if _is_plain(value) or callable(value):
                self._note(f"{name}.{each}", home, each, value)
            elif _is_object(value) or isinstance(value, types.SimpleNamespace):
                self._note_object(f"{name}.{each}", value)

    def _note_object(self, path: str, thing: Any, depth: int = 3) -> None:
        """Note what an object holds that nobody watches, and what that holds."""
        home: Any = thing.__dict__ if hasattr(thing, "__dict__") else _Slots(thing)
        if id(thing) in self._watched or depth == 0:
            return
        for name in list(home.keys()):
            value = home[name]
            if _is_object(value) or isinstance(value, types.SimpleNamespace):
                self._note_object(f"{path}.{name}", value, depth - 1)
            elif _is_plain(value):
                self._kept.append(home)
                self._note(f"{path}.{name}", home, name, value)

    def _note_closures(self, code: types.CodeType) -> None:
        for function in gc.get_referrers(code):
            if not isinstance(function, types.FunctionType) or function.__code__ is not code:
                continue
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # an empty cell
                    value = cell.cell_contents
                    if _is_object(value) or isinstance(value, types.SimpleNamespace):
                        self._note_object(f"{code.co_name}.{name}", value)
                    elif _is_plain(value):
                        home: Any = _Cell(cell)
                        self._kept.append(home)
                        self._note(f"{code.co_name}.{name}", home, name, value)


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


class _Slots:
    """The attributes of an object without a dictionary, to be read as others are."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def keys(self) -> list[str]:
        named = (getattr(each, "__slots__", ()) for each in type(self._thing).__mro__)
        slots = [name for each in named for name in ((each,) if isinstance(each, str) else each)]
        return [name for name in slots if hasattr(self._thing, name) and not name.startswith("__")]

    def __getitem__(self, name: str) -> Any:
        return getattr(self._thing, name)


class _Bytes:
    """What is in an array, to be read as other values are."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, _name: str) -> Any:
        return self._array.tobytes()


_ABSENT = object()


def _appended(path: str, container: Any, before: tuple[Any, ...], tensors: list[torch.Tensor]) -> Iterator[Effect]:
    """What was appended to a list."""
    now = elements_of(container)
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
        (hasattr(value, "__dict__") or hasattr(cls, "__slots__"))
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


def _is_own_class(cls: type) -> bool:
    """Return whether a class is neither Python's nor torch's."""
    return bool(cls.__flags__ & _HEAP_TYPE) and cls.__module__.partition(".")[0] not in _FOREIGN


def _is_foreign(filename: str) -> bool:
    """Return whether a file is torch's, memfit's or Python's own."""
    return in_library(filename) or (filename.startswith(_PYTHON) and "site-packages" not in filename)


def _is_array(value: Any) -> bool:
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray)


def _read_by(cls: Any, function: Callable[[Any, str], Any]) -> None:
    """Let a function read the attributes of a class's instances."""
    cls.__getattribute__ = function


def _defining(cls: type) -> type:
    """The class that says how attributes of another are read."""
    return next(each for each in cls.__mro__ if "__getattribute__" in each.__dict__ or each is object)
