"""Arguments taken apart into leaves, as torch's pytree does it, and records too.

Note [Records]
    Torch does not take a dataclass apart that is not registered with it, nor an object of a plain class, and to
    register one changes what others make of it. So a node of memfit's own stands for it while a tree is taken apart.
    What puts the tree together makes an instance of the same class with the same attributes; `__init__` does not run.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_HEAP_TYPE = 1 << 9  # a class that was made by a `class` statement
_OF_ITS_OWN_MAKING = {"__getattr__", "__getattribute__", "__setattr__", "__call__", "__next__", "__del__"}


def is_record(value: Any) -> bool:
    """Return whether a value is taken apart here: of a dataclass or a plain class that torch does not know.

    One without a tensor is not: it may be there to be compared by `is`.
    """
    return _may_be_record(value) and _holds_tensor(value, frozenset())


def _holds_tensor(record: Any, within: frozenset[int]) -> bool:
    if id(record) in within:
        return False
    inside = within | {id(record)}
    leaves = pytree.tree_leaves([*content_of(record).values()])
    if any(isinstance(each, torch.Tensor) for each in leaves):
        return True
    return any(_holds_tensor(each, inside) for each in leaves if _may_be_record(each))


def _may_be_record(value: Any) -> bool:
    cls: Any = type(value)
    return cls not in pytree.SUPPORTED_NODES and _is_of_records(cls)


@functools.lru_cache(maxsize=1024)
def _is_of_records(cls: type) -> bool:
    if type(cls) not in (type, abc.ABCMeta):
        return False
    own = [each for each in cls.__mro__ if each is not object]
    if not all(each.__flags__ & _HEAP_TYPE for each in own) or issubclass(cls, torch.nn.Module):
        return False
    if dataclasses.is_dataclass(cls):
        return True
    has_slots = any("__slots__" in each.__dict__ for each in own)
    return not has_slots and not any(_OF_ITS_OWN_MAKING & each.__dict__.keys() for each in own)


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Take a tree apart; `unflatten` puts it together."""
    leaves, spec = pytree.tree_flatten(tree)
    return pytree.tree_flatten(_opened(tree)) if any(map(is_record, leaves)) else (leaves, spec)


unflatten = pytree.tree_unflatten


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree."""
    return flatten(tree)[0]


def paths_of(tree: Any) -> list[tuple[Any, ...]]:
    """Return for every leaf of a tree the keys that lead to it."""
    return [path for path, _ in pytree.tree_flatten_with_path(_opened(tree))[0]]


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return the same tree with other tensors."""
    leaves, spec = flatten(tree)
    return unflatten([function(each) if isinstance(each, torch.Tensor) else each for each in leaves], spec)


def content_of(record: Any) -> dict[str, Any]:
    """Return the attributes of a record by name: its fields, and what was put beside them."""
    fields = [each.name for each in dataclasses.fields(record)] if dataclasses.is_dataclass(record) else []
    return {name: getattr(record, name) for name in fields if hasattr(record, name)} | getattr(record, "__dict__", {})


def children_of(record: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return what lies right in a record, and what puts it together."""
    node = _Node(record, content_of(record))
    return pytree.tree_flatten(node, is_leaf=lambda each: each is not node)


class _Node:
    """Stands for a record while a tree is taken apart, see Note [Records]."""

    def __init__(self, record: Any, content: dict[str, Any]) -> None:
        self.kind, self.content = type(record), content

    def taken_apart(self) -> tuple[list[Any], Any]:
        return [*self.content.values()], (self.kind, *self.content)

    def taken_apart_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        return [(pytree.GetAttrKey(name), each) for name, each in self.content.items()], (self.kind, *self.content)


def _opened(tree: Any, within: frozenset[int] = frozenset()) -> Any:
    """Put nodes in the place of records, but of those that they are `within`."""
    leaves, spec = pytree.tree_flatten(tree)
    if not any(map(is_record, leaves)):
        return tree
    return pytree.tree_unflatten([_node_of(each, within) if is_record(each) else each for each in leaves], spec)


def _node_of(record: Any, within: frozenset[int]) -> Any:
    if id(record) in within:
        return record
    inside = within | {id(record)}
    return _Node(record, {name: _opened(each, inside) for name, each in content_of(record).items()})


def _made(values: Any, context: Any) -> Any:
    kind, *names = context
    record = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(record, name, value)  # also of a frozen one
    return record


pytree.register_pytree_node(_Node, _Node.taken_apart, _made, flatten_with_keys_fn=_Node.taken_apart_with_keys)
