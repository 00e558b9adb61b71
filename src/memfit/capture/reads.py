"""Follow what the Python code of a forward reads and leaves behind while it is traced.

Note [What was read]
    A trace has the numbers in it that the forward found on modules, on the objects they hold, in the globals and
    closures of the model's code. While it runs, every attribute of a module that is read is noted, and every attribute
    of an object that was read so (`notes.py`). Names of globals are taken from the code (`names.py`): of functions that
    run an operator, of those they name, and of the modules' own methods. Later all that is compared before every call
    (`guards.py`).
"""

import contextlib
import dataclasses
import inspect
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from memfit.capture.answers import answers
from memfit.capture.asked import check_no_identities
from memfit.capture.effects import Left, appended
from memfit.capture.guards import Guards, Place, elements_of
from memfit.capture.held import generator_state, is_foreign, is_own_class
from memfit.capture.hooks import HOOKS_OF_ALL
from memfit.capture.names import ENVIRONMENT, Names, check_no_writes, check_same_in_every_call, named_by
from memfit.capture.notes import HOOKS, Notes
from memfit.capture.numbers import Numbers
from memfit.capture.outputs import is_constant
from memfit.capture.record import in_library
from memfit.ops.number import NotFollowed
from memfit.tensors import tensors_in

_OF_RECURRENT = {"_flat_weights", "_flat_weight_refs"}  # which follow the parameters
_OWN = frozenset(vars(nn.Module())) - HOOKS | _OF_RECURRENT | {"forward", "__dict__", "__class__"}  # not noted here
_ABSENT = object()
_CARRIES = (
    "the forward reads {} and writes it, so that it carries something from one call to the next that a captured call "
    "would not see; keep it in a buffer"
)

KnownValue = Callable[[torch.Tensor], torch.Tensor | None]  # of a tensor that depends on nothing but constants


@dataclasses.dataclass(slots=True)
class _Watched:
    """An object whose attributes are noted when they are read."""

    thing: Any
    path: str
    home: dict[str, Any]
    before: dict[str, Any]  # its attributes before the forward

    def path_of(self, name: str) -> str:
        """Return the path of an attribute."""
        return f"{self.path}.{name}".lstrip(".")


class Reads:
    """Notes what the forward of a model reads, see Note [What was read]."""

    def __init__(self, model: nn.Module, numbers: Numbers) -> None:
        self._numbers = numbers
        self._thread = threading.get_ident()
        self._watched: dict[int, _Watched] = {}
        self._is_following = False
        self._absent: dict[tuple[int, str], Place] = {}  # attributes that were asked for in vain
        self._patched: dict[type, Any] = {}
        self._caches: list[tuple[str, Any, tuple[Any, ...]]] = []  # containers that every call fills alike
        self._codes: dict[types.CodeType, dict[str, Any]] = {}  # that ran, with their globals
        self._tied = _names_of_tied(model)
        parts = {id(module) for module in model.modules()}
        self._notes = Notes(self._watch_object, lambda module: id(module) in parts)
        self._names = Names(self._notes)
        self._forwards = [module.__dict__ for module in model.modules() if module is not model]
        for path, module in model.named_modules(remove_duplicate=True):
            self._watch(path, module)
        classes = {each for module in model.modules() for each in type(module).__mro__}
        classes |= {each for cls in classes for each in inspect.getmro(type(cls))}  # metaclasses
        self._names.note_classes(each for each in classes if is_own_class(each))

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Note what is read meanwhile."""
        self._is_following = True
        for each in {nn.Module, *(_defining(type(each.thing)) for each in self._watched.values())} - {object}:
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

    def codes(self) -> list[tuple[types.CodeType, dict[str, Any]]]:
        """Return the code that is known to belong to the forward so far, with its globals."""
        return [*self._names.seen(), *self._codes.items()]

    def note_class(self, cls: type) -> None:
        """Note what the class of an argument holds, and what its methods name."""
        own = [each for each in cls.__mro__ if is_own_class(each)]
        self._names.note_classes(own)
        for each in own:
            self._names.note_values_of(each)

    def note(self, path: str, home: Any, name: str, value: Any) -> None:
        """Note a value that the forward has read."""
        self._notes.note(path, home, name, value)

    def note_absent(self, path: str, home: Any, name: str, value: Any) -> None:
        """Note that the forward has asked for something that is not there."""
        self._absent[id(home), name] = Place(path, home, name, value)

    def ran(self, frame: types.FrameType) -> None:
        """Note that a function runs an operator."""
        if frame.f_code not in self._codes and not in_library(frame.f_code.co_filename):
            self._codes[frame.f_code] = frame.f_globals

    def guards(self, followed: Sequence[Place] = ()) -> Guards:
        """Compare later all that was read, but for numbers that are followed; ValueError if the code writes globals."""
        for code, around in self._codes.items():
            check_no_writes(code, around)
            check_same_in_every_call(code, around)
        self._names.note(list(self._codes.items()))
        for code, around in self._names.named_by(self._codes).items():
            if not is_foreign(code.co_filename):
                check_no_identities(code, around, self._tied)
                check_same_in_every_call(code, around)
                for path, home, name, value in answers(code.co_names, named_by(code, around)):
                    self._notes.note(path, home, name, value)
        while functions := self._notes.take_functions():
            for each in functions:
                check_no_identities(each.__code__, each.__globals__, self._tied)
            self._names.note([(each.__code__, each.__globals__) for each in functions])
        hooks = [(name, getattr(torch_module, name)) for name in HOOKS_OF_ALL]
        of_all = [(name, each, elements_of(each)) for name, each in hooks]
        if followed and any("type" in each.co_names for each in self._names.named_by(self._codes)):
            raise NotFollowed("the code asks for the type of something, maybe of a number that changes")
        keys = {(id(each.home), each.name) for each in followed}
        places = [each for key, each in self._notes.places.items() if key not in keys]
        containers = [*self._notes.compared(), *of_all]
        objects = [(each.path, each.thing) for each in self._watched.values()]
        return Guards(places, containers, self._forwards, followed, [*self._absent.values()], objects)

    def may_draw(self) -> bool:
        """Return whether code that ran names a generator of Python's or NumPy's; others may draw meanwhile."""
        return self._names.may_draw(self._codes)

    def contents(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Return what is in the containers that were read."""
        return [(path, elements_of(container)) for path, container, _ in self._notes.containers.values()]

    def restore(self) -> None:
        """Put back what the forward has left on objects and in lists; modules are put back by their snapshot."""
        for place in self._changed_outside():
            place.home[place.name] = place.value  # type: ignore[index]
        for watched in self._watched.values():
            if not isinstance(watched.thing, nn.Module):
                watched.home.clear()
                watched.home.update(watched.before)
        for _, container, content in (*self._notes.containers.values(), *self._caches):
            if isinstance(container, list):
                container[:] = content
            elif isinstance(container, dict):
                _refill(container, content)

    def held(self) -> list[tuple[str, Any]]:
        """Return the lists, dictionaries and objects that the model holds and that the forward reads."""
        containers = [(path, container) for path, container, _ in (*self._notes.containers.values(), *self._caches)]
        return [*containers, *((each.path, each.thing) for each in self._watched.values())]

    def left_behind(self, known_value: KnownValue) -> list[Left]:
        """Return what the forward has left behind, see Note [What is left behind] in `effects.py`.

        ValueError if a call cannot leave it behind again.
        """
        found: list[Left] = []
        self._notes.containers |= {id(each[1]): each for each in self._caches}  # of an earlier trace
        self._caches.clear()
        for watched in self._watched.values():
            for name in watched.before.keys() - watched.home.keys():
                raise ValueError(f"the forward deletes the attribute {watched.path_of(name)}")
            for name, once in self._written(watched, known_value):
                value = watched.home[name] if once is None else None
                found.append(Left(path=watched.path_of(name), home=watched.home, name=name, value=value, once=once))
        for path, container, content in list(self._notes.containers.values()):
            made = self._made_by_every_call(container, content, known_value)
            if made:
                self._caches.append(self._notes.containers.pop(id(container)))
                found += [Left(path=path, home=container, name=key, value=None, once=made[key]) for key in made]
            elif path != ENVIRONMENT:  # which libraries write when they are first used
                found += appended(path, container, content)
        for place in self._changed_outside():
            raise ValueError(_CARRIES.format(place.path))
        for path, generator, state in self._notes.generators:
            if generator_state(generator) != state:
                raise ValueError(f"the forward draws from {path}, a generator of Python's or NumPy's; draw with torch")
        return found

    def _made_by_every_call(
        self, container: Any, before: tuple[Any, ...], known_value: KnownValue
    ) -> dict[Any, torch.Tensor]:
        """Return what was put into a dictionary of tensors that depends on nothing but constants: a cache."""
        if not isinstance(container, dict):
            return {}
        earlier = {id(each) for each in before}
        new = {key: value for key, value in dict.items(container) if id(value) not in earlier}
        if not all(isinstance(each, torch.Tensor) for each in (*before[len(before) // 2 :], *new.values())):
            return {}
        made = {key: known_value(each) for key, each in new.items()}
        known = {key: each for key, each in made.items() if each is not None}
        return known if len(known) == len(new) else {}

    def _changed_outside(self) -> list[Place]:
        """Return places beside those of watched objects that do not hold what they held."""
        homes = {id(watched.home) for watched in self._watched.values()}
        outside = [each for each in self._notes.places.values() if id(each.home) not in homes]
        return [each for each in outside if isinstance(each.home, dict) and each.is_other()]

    def _written(self, watched: _Watched, known_value: KnownValue) -> Iterator[tuple[str, Any]]:
        """Yield the attributes that the forward has written and that a call can write again.

        With each comes what is written once, where that depends on nothing but constants; else None.
        """
        for name, value in watched.home.items():
            old = watched.before.get(name, _ABSENT)
            if value is old or name in _OWN or _is_same_constant(value, old):
                continue
            place = (id(watched.home), name)
            tensors = tensors_in(value)
            if place not in self._notes.places or isinstance(value, bool | str | None):
                yield name, None
            elif old is None and tensors and all(known_value(each) is not None for each in tensors):
                del self._notes.places[place]  # made by every call
                yield name, pytree.tree_map_only(torch.Tensor, known_value, value)
            else:
                raise ValueError(_CARRIES.format(watched.path_of(name)))

    def _watch(self, path: str, thing: Any) -> None:
        self._watched[id(thing)] = _Watched(thing, path, thing.__dict__, self._numbers.attributes(thing.__dict__))

    def _watch_object(self, path: str, thing: Any) -> bool:
        """Watch an object that was read; False if its attributes cannot be followed."""
        if id(thing) in self._watched:
            return True
        if not hasattr(thing, "__dict__") or not self._patch(type(thing)):
            return False
        self._watch(path, thing)
        return True

    def _patch(self, cls: type) -> bool:
        """Note what is read of a class's instances; False if that cannot be done."""
        if cls in self._patched:
            return True
        if not self._is_following:
            return False
        original = cls.__dict__.get("__getattribute__")
        read: Any = cls.__getattribute__
        noted, noted_as_absent = self._noted, self._noted_as_absent

        def recording(instance: Any, name: str) -> Any:
            try:
                value = read(instance, name)
            except AttributeError:
                noted_as_absent(instance, name)
                raise
            noted(instance, name, value)
            return value

        try:
            _read_by(cls, recording)
        except TypeError:  # not a class of Python's
            return False
        self._patched[cls] = original
        return True

    def _noted(self, instance: Any, name: str, value: Any) -> None:
        watched = self._watched.get(id(instance))
        if watched is None or threading.get_ident() != self._thread:
            return
        if name == "__dict__" and not in_library(sys._getframe(2).f_code.co_filename):
            for each in watched.before.keys() - _OWN:  # which of them are read is not seen
                self._notes.note(watched.path_of(each), watched.home, each, watched.before[each])
        if name in _OWN:
            return
        if isinstance(value, torch.Generator):
            raise ValueError(
                f"the forward reads {watched.path_of(name)}, a generator of its own, which a captured call does not "
                "draw from; draw from torch's own generator"
            )
        for before in _homes_before(watched, type(instance), name):
            self._absent[id(before), name] = Place(watched.path_of(name), before, name, None)
        home = _home_of(watched, type(instance), name, value)
        if home is not None:
            self._notes.note(watched.path_of(name), home, name, value)

    def _noted_as_absent(self, instance: Any, name: str) -> None:
        """Note that an attribute was asked for that is not there; parts and parameters are found elsewhere."""
        watched = self._watched.get(id(instance))
        if watched is None or threading.get_ident() != self._thread or name.startswith("__"):
            return
        registries = [watched.before.get(each) for each in ("_parameters", "_buffers", "_modules")]
        if name not in watched.before and not any(name in each for each in registries if each is not None):
            self._absent[id(watched.home), name] = Place(watched.path_of(name), watched.home, name, None)


def _names_of_tied(model: nn.Module) -> set[str]:
    """Return the names, in their modules, of weights and buffers that are in several places."""
    states = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    counts = Counter(id(each) for _, each in states)
    return {name.rpartition(".")[2] for name, each in states if counts[id(each)] > 1}


def _homes_before(watched: _Watched, cls: type, name: str) -> list[Mapping[str, Any]]:
    """Return where another value would be found before one that was read from a class of the user's."""
    if name in watched.home or name.startswith("__"):
        return []
    homes: list[Mapping[str, Any]] = []
    for each in cls.__mro__:
        found = each.__dict__.get(name, _ABSENT)
        if found is not _ABSENT:
            is_first = hasattr(type(found), "__set__")  # a property, which comes before what an instance holds
            return [*homes, *([] if is_first else [watched.home])] if is_own_class(each) else []
        homes += [each.__dict__] if is_own_class(each) else []
    return []


def _home_of(watched: _Watched, cls: type, name: str, value: Any) -> Mapping[str, Any] | None:
    """Return where a value that was read is; None if it needs no note."""
    if name in watched.home:
        was_written = watched.before.get(name, _ABSENT) is not value  # by this forward
        return None if was_written else watched.home
    defining = next((each for each in cls.__mro__ if name in each.__dict__), None)
    if defining is None or not is_own_class(defining) or not is_constant(defining.__dict__[name]):
        return None  # methods are noted with their class
    return defining.__dict__


def _refill(container: dict[Any, Any], content: tuple[Any, ...]) -> None:
    """Put back what was in a dictionary, if something else is there."""
    count = len(content) // 2
    before = dict(zip(content[:count], content[count:], strict=True))
    now = dict(dict.items(container))
    if now.keys() != before.keys() or any(now[key] is not value for key, value in before.items()):
        container.clear()
        container.update(before)


def _is_same_constant(one: Any, other: Any) -> bool:
    return is_constant(one) and type(one) is type(other) and bool(one == other)


def _read_by(cls: Any, function: Callable[[Any, str], Any]) -> None:
    """Let a function read the attributes of a class's instances."""
    cls.__getattribute__ = function


def _defining(cls: type) -> type:
    """Return the class that says how attributes of another are read."""
    return next(each for each in cls.__mro__ if "__getattribute__" in each.__dict__ or each is object)
