"""Leave behind after every call what a forward leaves on modules and in lists.

Note [What is left behind]
    What a forward puts on its modules is compared with what was there before. Tensors and constants that it writes
    without having read what was there are results of the call like those it returns, and are put there after every
    call; so is what it appends to a list. A tensor that depends on nothing but constants, and that is put in the place
    of None or into a dictionary of such (a cache), is put there by the first call. A flag that is read and set
    ("ready") is put there too; the next call has read another value, and is captured anew. All else would carry
    something from one call to the next that a captured call does not see, so it is refused.

    Lists and dictionaries that the forward is given (`model(batch, found)`) are others in every call. What it does to
    them is done again by their place among the arguments, whatever it is: what was in them belongs to the kind of call.
"""

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memfit.capture.guards import elements_of
from memfit.capture.outputs import OutputTemplate, Parts, is_constant

_REFILLED = (list, deque, dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """Something a forward leaves behind, with its tensors taken out."""

    home: Any  # the attributes of an object, or a list
    name: Any  # of the attribute, or the key; None: is appended to the list
    template: OutputTemplate
    given: int | None = None  # the home is what is at this place of what the call is given
    is_all: bool = False  # it is all that is in its home
    once: Any = None  # what depends on nothing but constants, and is left where nothing is yet

    def apply(self, tensors: list[torch.Tensor], given: Sequence[Any], made: dict[int, Any]) -> None:
        """Leave it behind again; `made` are the containers that others of the same call share with it."""
        if self.once is not None:
            if self.home.get(self.name) is None:
                self.home[self.name] = self.once
            return
        value = self.template.rebuild(tensors, given, made)
        home = self.home if self.given is None else given[self.given]
        if self.is_all:
            home.clear()
        if self.name is not None:
            home[self.name] = value
        elif isinstance(home, dict):
            home.update(value)
        else:
            home.extend(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left:
    """Something a forward has left behind; the fields are those of `Effect`."""

    path: str
    home: Any = None
    name: Any = None
    value: Any
    given: int | None = None
    is_all: bool = False
    once: Any = None

    def effect(self, parts: Parts) -> Effect:
        """Take the tensors out; ValueError if a call cannot make it again."""
        try:
            template = parts.template(self.value)
        except ValueError:
            raise ValueError(
                f"the forward leaves a {type(self.value).__name__} in {self.path}, which a captured call cannot make "
                "again"
            ) from None
        return Effect(
            home=self.home,
            name=self.name,
            template=template,
            given=self.given,
            is_all=self.is_all,
            once=self.once,
        )


def appended(path: str, container: Any, before: tuple[Any, ...]) -> Iterator[Left]:
    """Describe what was appended to a list or put into a dictionary; refuse other changes of a container."""
    now = elements_of(container)
    if isinstance(container, dict):
        yield from _put(path, container, before)
        return
    begins_alike = _begins_with(now, before)
    if begins_alike and len(now) == len(before):
        return
    if not begins_alike or not isinstance(container, list):
        raise ValueError(
            f"the forward changes what is in {path}, which a captured call would not do again; return it instead"
        )
    yield Left(path=path, home=container, value=list(now[len(before) :]))


def _put(path: str, container: dict[Any, Any], before: tuple[Any, ...]) -> Iterator[Left]:
    """Describe what was put into a dictionary."""
    count = len(before) // 2
    earlier = dict(zip(before[:count], before[count:], strict=True))
    if earlier.keys() - dict.keys(container):
        raise ValueError(f"the forward takes something out of {path}, which a captured call would not do again")
    for key, value in dict.items(container):
        if key not in earlier or earlier[key] is not value:
            if not isinstance(key, str | int):
                raise ValueError(f"the forward puts something into {path} under a key that a call may not have again")
            yield Left(path=f"{path}[{key!r}]", home=container, name=key, value=value)


def done_to_given(
    path: str, place: int, container: Any, before: tuple[Any, ...], now: tuple[Any, ...]
) -> Iterator[Left]:
    """Describe what was done to a container that the forward was given, by its place among what the call gets."""
    if len(now) == len(before) and _begins_with(now, before):
        return
    if not isinstance(container, _REFILLED) or not _are_keys_constant(container):
        raise ValueError(
            f"the forward changes what is in {path}, a {type(container).__name__} that it is given, which a captured "
            "call would not do again: return it instead"
        )
    if isinstance(container, list) and _begins_with(now, before):
        yield Left(path=path, given=place, value=list(now[len(before) :]))
    else:
        yield Left(path=path, given=place, value=_copied(container, now), is_all=True)


def _begins_with(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    return len(now) >= len(before) and all(one is other for one, other in zip(now, before, strict=False))


def _are_keys_constant(container: Any) -> bool:
    return not isinstance(container, dict) or all(map(is_constant, dict.keys(container)))


def _copied(container: Any, now: tuple[Any, ...]) -> Any:
    """Return what is in a container in one of its own, which is not the one that the call is given."""
    if isinstance(container, OrderedDict):  # whose order is not that of the dictionary under it
        return dict(OrderedDict.items(container))
    return dict(dict.items(container)) if isinstance(container, dict) else list(now)
