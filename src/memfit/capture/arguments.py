"""Give a forward its arguments in a trace as the eager run gives them, and see what it does to them.

Note [Arguments as they are]
    Torch takes arguments apart and puts others together for a trace. Constants in them would be copies, which are not
    `is` what the model's code compares them with, and a tensor that is given twice would be two. So constants are given
    as they are, and of one tensor there is one. What a forward puts into a list or dictionary that it is given, or
    takes out, a captured call would not do again: that is refused.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memfit.capture.guards import elements_of
from memfit.capture.held import CONTAINERS
from memfit.capture.sample import Sample

_Content = tuple[str, Any, tuple[Any, ...]]  # a path, a container, and what was in it


def as_given(sample: Sample, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return traced arguments with the constants of a sample, and one tensor where it has one."""
    own = pytree.tree_leaves((sample.args, dict(sample.kwargs)))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    first: dict[int, Any] = {}
    same = [
        first.setdefault(id(each), traced) if isinstance(each, torch.Tensor) else each
        for each, traced in zip(own, leaves, strict=True)
    ]
    given_args, given_kwargs = pytree.tree_unflatten(same, spec)
    return given_args, given_kwargs


class GivenContainers:
    """Remembers what is in the lists and dictionaries that a forward is given, see Note [Arguments as they are]."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._contents: list[_Content] = []
        for name, each in (*enumerate(args), *kwargs.items()):
            self._contents += _contents_of(f"argument {name!r}", each)

    def check_unchanged(self) -> None:
        """Refuse what the forward has changed."""
        for path, container, before in self._contents:
            now = elements_of(container)
            if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                raise ValueError(
                    f"the forward changes what is in {path}, which it is given; a captured call would not do that "
                    "again: return it instead"
                )


def _contents_of(path: str, value: Any) -> Iterator[_Content]:
    if not isinstance(value, CONTAINERS):
        return
    if not isinstance(value, tuple | frozenset):
        yield path, value, elements_of(value)
    named = dict.items(value) if isinstance(value, dict) else enumerate(value)
    for key, each in named:
        yield from _contents_of(f"{path}[{key!r}]", each)
