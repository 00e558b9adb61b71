"""Give a forward its arguments in a trace as the eager run gives them, and see what it does to them.

Note [Arguments as they are]
    Torch takes arguments apart and puts others together for a trace. Constants in them would be copies, which are not
    `is` what the model's code compares them with; a tensor, or a list, that is given twice would be two. So constants
    are given as they are, and of one thing there is one. A parameter or buffer of the model among them is that.

    What a forward does to a list or dictionary that it is given is found by comparison (`effects.py`). By every call
    it is done to the one at the same place among the arguments: `containers_in` counts them.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memfit.capture.effects import Effect, Left, done_to_given
from memfit.capture.guards import elements_of
from memfit.capture.held import CONTAINERS
from memfit.capture.outputs import OutputTemplate, children_of
from memfit.capture.sample import Sample, is_container, with_leaves


class GivenArguments:
    """The arguments of one run of a forward in a trace, see Note [Arguments as they are]."""

    def __init__(
        self,
        sample: Sample,
        leaves: Sequence[Any],
        states: Sequence[torch.Tensor],
        own_states: Sequence[torch.Tensor],
    ) -> None:
        """`leaves` are traced, in the place of those of a sample; so are `states` of the model's own."""
        self.own = own = sample.leaves()
        self.leaves = leaves
        first = {id(each): traced for each, traced in zip(own_states, states, strict=True)}
        same = [
            first.setdefault(id(each), traced) if isinstance(each, torch.Tensor) else each
            for each, traced in zip(own, leaves, strict=True)
        ]
        made: dict[int, Any] = {}
        given = iter(same)
        self.args = tuple([with_leaves(each, given, made) for each in sample.args])
        self.kwargs = {name: with_leaves(each, given, made) for name, each in sample.kwargs.items()}
        self.tensors = [each for each in same if isinstance(each, torch.Tensor)]
        self.containers = containers_in(self.args, self.kwargs)
        self._before = [*map(_content_of, self.containers)]
        self._own = containers_in(sample.args, dict(sample.kwargs))

    def check_apart(self, held: dict[int, str]) -> None:
        """Refuse changes of a container that the model holds, too; `held` are paths by identity."""
        for own, container, before in zip(self._own, self.containers, self._before, strict=True):
            if id(own) in held and [*map(id, _content_of(container))] != [*map(id, before)]:
                raise ValueError(
                    f"the forward changes {held[id(own)]}, which it is given as an argument, too; a captured call "
                    "takes that for two: read it from one place"
                )

    def left(self, first: int) -> Iterator[Left]:
        """Yield what the forward has done to containers; `first` is the place of the first of them among `given`."""
        seen: set[int] = set()
        for place, (container, before) in enumerate(zip(self.containers, self._before, strict=True)):
            if id(container) not in seen and not isinstance(container, tuple):
                seen.add(id(container))
                path = f"argument {self._name_of(container)!r}"
                yield from done_to_given(path, first + place, container, before, _content_of(container))

    def _name_of(self, container: Any) -> Any:
        """Return the place or the name of the argument in which a container is."""
        named = (*enumerate(self.args), *self.kwargs.items())
        return next(name for name, each in named if any(one is container for one in containers_in((each,), {})))


@dataclasses.dataclass(frozen=True)
class Results:
    """Leave behind and return what a call does."""

    template: OutputTemplate
    effects: tuple[Effect, ...]
    take_containers: bool  # they hold, or are put into, containers that the call is given

    def of(self, tensors: list[torch.Tensor], given: Sequence[Any], args: Any, kwargs: Any) -> Any:
        """Leave behind and return it, made of the tensors of a call."""
        if self.take_containers:
            given = (*given, *containers_in(args, kwargs))
        made: dict[int, Any] = {}
        for effect in self.effects:
            effect.apply(tensors, given, made)
        return self.template.rebuild(tensors, given, made)


def containers_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return all containers among arguments in order, as often as they are there."""
    found: list[Any] = []
    _look_into((*args, *kwargs.values()), found)
    return found


def pattern_of(containers: Sequence[Any]) -> tuple[int, ...]:
    """Return which of some containers are the same object; empty if none are."""
    ids = [id(each) for each in containers if not isinstance(each, tuple)]
    if len({*ids}) == len(ids):
        return ()
    first: dict[int, int] = {}
    return tuple([first.setdefault(each, place) for place, each in enumerate(ids)])


def _look_into(values: Any, found: list[Any]) -> None:
    for each in values:
        if not isinstance(each, torch.Tensor) and is_container(each):
            found.append(each)
            _look_into(dict.values(each) if isinstance(each, dict) else _content_of(each), found)


def _content_of(container: Any) -> tuple[Any, ...]:
    """Return what lies right in a container, as torch takes it apart; of a dictionary the keys, too."""
    if isinstance(container, OrderedDict):  # whose order is not that of the dictionary under it
        return *OrderedDict.keys(container), *OrderedDict.values(container)
    if isinstance(container, CONTAINERS):
        return elements_of(container)
    return tuple(children_of(container)[0])
