"""What a model returns, taken apart into tensors and put together again.

Registered containers (tuples, dicts, transformers' `ModelOutput`) and plain dataclasses are
taken apart; anything else that is not a tensor is a constant of the captured call.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memfit.errors import InvalidInput


@dataclasses.dataclass(frozen=True)
class _TensorSlot:
    index: int


@dataclasses.dataclass(frozen=True)
class _GivenSlot:
    """Stands for a parameter, a buffer or an argument that is returned as the object it is."""

    index: int


@dataclasses.dataclass(frozen=True)
class _Constant:
    value: Any


@dataclasses.dataclass(frozen=True)
class _Dataclass:
    cls: type
    fields: "OutputTemplate"


_Leaf = _TensorSlot | _GivenSlot | _Constant | _Dataclass


@dataclasses.dataclass(frozen=True)
class OutputTemplate:
    """The shape of a model's output, without its tensors."""

    spec: pytree.TreeSpec
    leaves: tuple[_Leaf, ...]

    def rebuild(self, tensors: Sequence[torch.Tensor], given: Sequence[Any] = ()) -> Any:
        """Put an output together from the tensors of a call and what it was given."""
        return pytree.tree_unflatten([_fill(leaf, tensors, given) for leaf in self.leaves], self.spec)

    def shifted(self, count: int) -> "OutputTemplate":
        """The template of the same tensors behind `count` others."""
        return OutputTemplate(self.spec, tuple(_shifted(leaf, count) for leaf in self.leaves))

    def only(self, indices: Sequence[int]) -> "OutputTemplate":
        """The template in which only these tensors are left, renumbered; `None` stands for the others."""
        return OutputTemplate(self.spec, tuple(_only(leaf, indices) for leaf in self.leaves))


def take_apart(output: Any, given: Sequence[Any] = ()) -> tuple[list[torch.Tensor], OutputTemplate]:
    """Split an output into its tensors and the template that puts them together again.

    Tensors that are among those `given` to the call are not split off.
    """
    tensors: list[torch.Tensor] = []
    return tensors, _template(output, tensors, {id(each): place for place, each in enumerate(given)})


def _template(output: Any, tensors: list[torch.Tensor], given: Mapping[int, int]) -> OutputTemplate:
    leaves, spec = pytree.tree_flatten(output)
    return OutputTemplate(spec, tuple(_leaf(leaf, tensors, given) for leaf in leaves))


def _leaf(leaf: Any, tensors: list[torch.Tensor], given: Mapping[int, int]) -> _Leaf:
    if isinstance(leaf, torch.Tensor):
        if id(leaf) in given:
            return _GivenSlot(given[id(leaf)])
        tensors.append(leaf)
        return _TensorSlot(len(tensors) - 1)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
        return _Dataclass(type(leaf), _template(fields, tensors, given))
    if not is_constant(leaf):
        raise ValueError(
            f"the output holds a {type(leaf).__name__}, whose tensors cannot be found; return tensors, "
            "tuples, dicts or dataclasses of them"
        )
    return _Constant(leaf)


def is_constant(value: Any) -> bool:
    """Whether a value is the same in every call that looks the same: nothing can change inside it."""
    return value is None or issubclass(type(value), _CONSTANTS)  # whatever class it says it is of


_PLAIN = (bool, int, float, complex, str, bytes, Enum, type)
_CONSTANTS = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


def _fill(leaf: _Leaf, tensors: Sequence[torch.Tensor], given: Sequence[Any]) -> Any:
    if isinstance(leaf, _TensorSlot):
        return tensors[leaf.index]
    if isinstance(leaf, _GivenSlot):
        return given[leaf.index]
    if isinstance(leaf, _Constant):
        return leaf.value
    instance: Any = object.__new__(leaf.cls)
    for name, value in leaf.fields.rebuild(tensors, given).items():
        object.__setattr__(instance, name, value)
    return instance


def _only(leaf: _Leaf, indices: Sequence[int]) -> _Leaf:
    if isinstance(leaf, _GivenSlot):
        return _Constant(None)
    if isinstance(leaf, _TensorSlot):
        return _TensorSlot(indices.index(leaf.index)) if leaf.index in indices else _Constant(None)
    return _Dataclass(leaf.cls, leaf.fields.only(indices)) if isinstance(leaf, _Dataclass) else leaf


def _shifted(leaf: _Leaf, count: int) -> _Leaf:
    if isinstance(leaf, _TensorSlot):
        return _TensorSlot(leaf.index + count)
    return _Dataclass(leaf.cls, leaf.fields.shifted(count)) if isinstance(leaf, _Dataclass) else leaf


def key_name(key: Any) -> str:
    """What a step on the way to a leaf is called."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def differentiated(tensors: Sequence[torch.Tensor], backward_from: str) -> tuple[int, ...]:
    """Which outputs the backward pass starts from.

    `"all"`: every output that requires a gradient. `"auto"`: the only scalar among them if
    there is one (a loss beside logits), otherwise all.
    """
    if backward_from not in ("auto", "all"):
        raise InvalidInput(f'backward_from is "auto" or "all", {backward_from!r} was given')
    requiring = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    scalars = [index for index in requiring if tensors[index].dim() == 0]
    if backward_from == "auto" and len(scalars) == 1:
        return tuple(scalars)
    return tuple(requiring)
