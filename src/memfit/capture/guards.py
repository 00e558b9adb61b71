"""Compare values that a trace has read with those that are there now.

Note [Quick to see]
    As a rule nothing has changed, and everything read is the same object as before. That is seen first, place by place,
    in C. Only where an object is another one, values are compared: equal numbers are the same.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from operator import contains, getitem, is_
from typing import Any

import torch

from memfit.capture.held import values_in
from memfit.capture.outputs import is_constant

ANY_TENSOR = object()  # in a container: captured calls get parameters as they are, and others are not read but kept


@dataclasses.dataclass(slots=True)
class Place:
    """A value by its name in a dictionary of attributes or globals."""

    path: str
    home: Mapping[str, Any]
    name: str
    value: Any

    def is_other(self) -> bool:
        """Return whether another value is there now."""
        now = self.home.get(self.name, ANY_TENSOR)
        return now is not self.value and not _are_equal(now, self.value)


class Guards:
    """Compare the values that a capture has read, see `capture/reads.py`."""

    def __init__(
        self,
        places: Sequence[Place],
        containers: Sequence[tuple[str, Any, tuple[Any, ...]]],
        forwards: Sequence[dict[str, Any]] = (),
        followed: Sequence[Place] = (),
        absent: Sequence[Place] = (),
        objects: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """`containers` are paths, containers and what was in them, `forwards` attributes of modules.

        `objects` are paths and objects whose attributes were read, which are to be of the same classes.

        Of numbers that are `followed` only the type is compared, see `capture/numbers.py`. What was `absent` is to
        be absent still.
        """
        self._absent = list(absent)
        self._absent_homes = [each.home for each in absent]
        self._absent_names = [each.name for each in absent]
        self.followed = tuple(followed)
        self._objects = [each for _, each in objects]
        self._object_paths = [path for path, _ in objects]
        self._classes = [*map(type, self._objects)]
        self._forwards = list(forwards)
        self._own_forwards = [each.get("forward") for each in forwards]
        self._places = list(places)
        self._empty = [(path, container) for path, container, content in containers if not content]
        self._filled = [(path, container, content) for path, container, content in containers if content]
        self._arrange()

    def _arrange(self) -> None:
        self._homes = [each.home for each in self._places]
        self._names = [each.name for each in self._places]
        self._values = [each.value for each in self._places]
        self._empty_ones = [container for _, container in self._empty]

    def hold(self) -> bool:
        """Return whether everything is as it was, see Note [Quick to see]."""
        try:
            if not all(map(is_, map(getitem, self._homes, self._names), self._values)):
                if self._changed_place() is not None:
                    return False
                self._arrange()  # by the objects that are there now
        except KeyError:
            return False
        if any(self._empty_ones) or not self._are_forwards_own() or [*map(type, self._objects)] != self._classes:
            return False
        if any(map(contains, self._absent_homes, self._absent_names)):
            return False
        if self.followed and any(type(each.home.get(each.name)) is not float for each in self.followed):
            return False
        return all(map(_holds, self._filled)) if self._filled else True

    def _are_forwards_own(self) -> bool:
        """Return whether nobody has replaced the forward of a part; regions of memfit's own compute the same."""
        now = [each.get("forward") for each in self._forwards]
        return now == self._own_forwards or all(
            one is other or hasattr(one, "compile_call") for one, other in zip(now, self._own_forwards, strict=True)
        )

    def change(self) -> str:
        """Name the first value that is not as it was; empty if all are."""
        if not self._are_forwards_own():
            return "the forward of a part was replaced"
        for path, thing, was in zip(self._object_paths, self._objects, self._classes, strict=True):
            if type(thing) is not was:
                return f"the class of {path or 'the model'} was {was.__name__} and is {type(thing).__name__}"
        place = self._changed_place()
        if place is not None:
            now = place.home.get(place.name, "absent") if hasattr(place.home, "get") else place.home[place.name]
            return f"{place.path} was {_words(place.value)} and is {_words(now)}"
        for absent in self._absent:
            if absent.name in absent.home:
                return f"{absent.path} was not there and is {_words(absent.home[absent.name])}"
        for path, container in self._empty:
            if container:
                return f"{path} was empty and has {len(container)} elements"
        return next((f"what is in {each[0]} has changed" for each in self._filled if not _holds(each)), "")

    def among(self, names: Collection[str]) -> "Guards":
        """Return guards of the values alone that have some names."""
        places = [each for each in self._places if each.name in names]
        filled = [each for each in self._filled if each[0].rpartition(".")[2] in names]
        return Guards(places, filled, absent=[each for each in self._absent if each.name in names])

    def is_empty(self) -> bool:
        """Return whether no value is compared."""
        return not (self._places or self._filled or self._absent)

    def changed_numbers(self) -> list[Place]:
        """Return the numbers that are others now."""
        changed = [each for each in self._places if type(each.value) is float and isinstance(each.home, dict)]
        return [each for each in changed if type(each.home.get(each.name)) is float and each.is_other()]

    def _changed_place(self) -> Place | None:
        """The first place with another value; equal ones are taken as they are now."""
        for place in self._places:
            try:
                now = place.home[place.name]
            except (KeyError, ValueError):
                return place
            if now is not place.value:
                if not _are_equal(now, place.value):
                    return place
                place.value = now
        return None


def elements_of(container: Any) -> tuple[Any, ...]:
    """Return the elements of a container; of a dictionary the keys, too."""
    held = values_in(container)
    return (*dict.keys(container), *held) if isinstance(container, dict) else held


def _holds(filled: tuple[str, Any, tuple[Any, ...]]) -> bool:
    _, container, content = filled
    now = elements_of(container)
    if len(now) != len(content):
        return False
    return all(one is other or _are_alike(one, other) for one, other in zip(now, content, strict=True))


def _are_alike(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) if other is ANY_TENSOR else _are_equal(one, other)


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two constants are the same to a trace; -0.0 is not 0.0, and 1 is not 1.0."""
    if type(one) is not type(other) or not is_constant(one):
        return False
    return one.hex() == other.hex() if isinstance(one, float) else bool(one == other)


def _words(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"another {type(value).__name__}"
