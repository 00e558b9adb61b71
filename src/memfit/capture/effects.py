"""Leave behind after every call what a forward leaves on modules and in lists.

Note [What is left behind]
    What a forward puts on its modules is compared with what was there before. Tensors and constants that it writes
    without having read what was there are results of the call like those it returns, and are put there after every
    call; so is what it appends to a list. A tensor that depends on nothing but constants, and that is put in the place
    of None, is made by every call and need not be there. A flag that is read and set ("ready") is put there too; the
    next call has read another value, and is captured anew. All else would carry something from one call to the next
    that a captured call does not see, so it is refused.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memfit.capture.guards import elements_of
from memfit.capture.outputs import OutputTemplate, take_apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """Something a forward leaves behind, with its tensors taken out."""

    home: Any  # the attributes of an object, or a list
    name: Any  # of the attribute, or the key; None: is appended to the list
    template: OutputTemplate
    is_output: bool = False  # what is left behind is what the call returns

    def shifted(self, count: int) -> "Effect":
        """Return the same with its tensors behind `count` others."""
        return dataclasses.replace(self, template=self.template.shifted(count))

    def apply(self, tensors: list[torch.Tensor], given: Sequence[Any], output: Any) -> None:
        """Leave it behind again."""
        value = output if self.is_output else self.template.rebuild(tensors, given)
        if self.name is None:
            self.home.extend(value)
        else:
            self.home[self.name] = value


def assigned(path: str, home: dict[str, Any], name: str, found: "Found") -> Effect:
    """Describe an attribute as it is; its tensors are put behind those that are there."""
    value = home[name]
    if value is found.output and isinstance(value, dict | list):
        return Effect(home=home, name=name, template=take_apart(None)[1], is_output=True)
    found.check_not_returned(path, value)
    return Effect(home=home, name=name, template=found.template(path, value))


def appended(path: str, container: Any, before: tuple[Any, ...], found: "Found") -> Iterator[Effect]:
    """Describe what was appended to a list or put into a dictionary; refuse other changes of a container."""
    now = elements_of(container)
    found.check_not_returned(path, container)
    if isinstance(container, dict):
        yield from _put(path, container, before, found)
        return
    begins_alike = len(now) >= len(before) and all(one is other for one, other in zip(now, before, strict=False))
    if begins_alike and len(now) == len(before):
        return
    if not begins_alike or not isinstance(container, list):
        raise ValueError(
            f"the forward changes what is in {path}, which a captured call would not do again; return it instead"
        )
    yield Effect(home=container, name=None, template=found.template(path, list(now[len(before) :])))


def _put(path: str, container: dict[Any, Any], before: tuple[Any, ...], found: "Found") -> Iterator[Effect]:
    """Describe what was put into a dictionary."""
    count = len(before) // 2
    earlier = dict(zip(before[:count], before[count:], strict=True))
    if earlier.keys() - dict.keys(container):
        raise ValueError(f"the forward takes something out of {path}, which a captured call would not do again")
    for key, value in dict.items(container):
        if key not in earlier or earlier[key] is not value:
            if not isinstance(key, str | int):
                raise ValueError(f"the forward puts something into {path} under a key that a call may not have again")
            yield Effect(home=container, name=key, template=found.template(f"{path}[{key!r}]", value))


@dataclasses.dataclass(frozen=True)
class Found:
    """The tensors that a forward leaves behind; those it was given are not among them."""

    given: Sequence[Any]
    output: Any = None  # what the forward returns
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def check_not_returned(self, path: str, value: Any) -> None:
        """Refuse lists and dictionaries that are returned and held: a call would make two of one."""
        if isinstance(value, dict | list) and any(each is value for each in _containers_in(self.output)):
            raise ValueError(
                f"the forward returns {path}, which the model holds; a captured call would return another one: return "
                "a copy of it, or what is in it"
            )

    def template(self, path: str, value: Any) -> OutputTemplate:
        """Take the tensors out of a value and put them behind those that are there."""
        try:
            own, template = take_apart(value, self.given)
        except ValueError:
            raise ValueError(
                f"the forward leaves a {type(value).__name__} in {path}, which a captured call cannot make again"
            ) from None
        template = template.shifted(len(self.tensors))
        self.tensors.extend(own)
        return template


def _containers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        yield value
        for each in dict.values(value) if isinstance(value, dict) else value:
            yield from _containers_in(each)
