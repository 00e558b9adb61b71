"""What a model returns, taken apart into tensors and put together again.

Registered containers (tuples, dicts, transformers' `ModelOutput`) and plain dataclasses are
taken apart, with the attributes they have beside what they hold; anything else that is not a tensor is a constant of
the captured call.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memfit.errors import InvalidInput, InvalidModel, first_line


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


@dataclasses.dataclass(frozen=True)
class _Carrying:
    """A container with attributes that are not among what it holds."""

    container: "OutputTemplate"
    attributes: "OutputTemplate"


_Leaf = _TensorSlot | _GivenSlot | _Constant | _Dataclass | _Carrying


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
    template = _template(output, tensors, {id(each): place for place, each in enumerate(given)}, _carries)
    _check_rebuilt(output, template, tensors, given)
    return tensors, template


def _check_rebuilt(output: Any, template: OutputTemplate, tensors: list[torch.Tensor], given: Sequence[Any]) -> None:
    try:
        template.rebuild(tensors, given)
    except Exception as error:
        raise ValueError(
            f"the output, a {type(output).__name__}, cannot be made again from what it holds ({first_line(error)}); "
            "declare all that it holds as fields, or return a dict"
        ) from error


def _template(
    output: Any, tensors: list[torch.Tensor], given: Mapping[int, int], stops_at: Callable[[Any], bool]
) -> OutputTemplate:
    leaves, spec = pytree.tree_flatten(output, is_leaf=stops_at)
    return OutputTemplate(spec, tuple(_leaf(leaf, tensors, given) for leaf in leaves))


def _carries(value: Any) -> bool:
    """Return whether a value is taken apart otherwise than its kind is, or not at all."""
    return isinstance(value, torch.Size) or bool(_beside(value))


def _beside(value: Any) -> dict[str, Any]:
    """Return the attributes of a container that are neither fields of it nor under the same name in it."""
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not is_dataclass and not isinstance(value, tuple | list | dict):
        return {}
    attributes = getattr(value, "__dict__", {})
    fields = {field.name for field in dataclasses.fields(value)} if is_dataclass else set()
    items = value if isinstance(value, dict) else {}
    return {
        name: each
        for name, each in attributes.items()
        if name not in fields and (name not in items or dict.get(items, name) is not each)
    }


def _carrying(value: Any, tensors: list[torch.Tensor], given: Mapping[int, int]) -> _Carrying:
    return _Carrying(
        container=_template(value, tensors, given, lambda each: each is not value and _carries(each)),
        attributes=_template(_beside(value), tensors, given, _carries),
    )


def _leaf(leaf: Any, tensors: list[torch.Tensor], given: Mapping[int, int]) -> _Leaf:
    if isinstance(leaf, torch.Tensor):
        if id(leaf) in given:
            return _GivenSlot(given[id(leaf)])
        tensors.append(leaf)
        return _TensorSlot(len(tensors) - 1)
    if isinstance(leaf, torch.Size):
        return _Constant(leaf)
    if _carries(leaf) and (type(leaf) in pytree.SUPPORTED_NODES or pytree.is_namedtuple_instance(leaf)):
        return _carrying(leaf, tensors, given)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        named = [field.name for field in dataclasses.fields(leaf)]
        fields = {name: getattr(leaf, name) for name in named if hasattr(leaf, name)}
        return _Dataclass(type(leaf), _template(fields | _beside(leaf), tensors, given, _carries))
    if not is_constant(leaf):
        raise ValueError(f"the output holds a {type(leaf).__name__}, whose tensors cannot be found; {_advice(leaf)}")
    return _Constant(leaf)


def _advice(leaf: Any) -> str:
    if type(leaf).__name__.endswith("Cache"):  # of keys and values, for generating
        return "pass use_cache=False, or set model.config.use_cache = False, as training needs no cache"
    return "return tensors, tuples, dicts or dataclasses of them"


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
    if isinstance(leaf, _Carrying):
        return _with_attributes(leaf.container.rebuild(tensors, given), leaf.attributes.rebuild(tensors, given))
    return _with_attributes(object.__new__(leaf.cls), leaf.fields.rebuild(tensors, given))


def _with_attributes(instance: Any, attributes: Mapping[str, Any]) -> Any:
    for name, value in attributes.items():
        object.__setattr__(instance, name, value)
    return instance


def _only(leaf: _Leaf, indices: Sequence[int]) -> _Leaf:
    if isinstance(leaf, _GivenSlot):
        return _Constant(None)
    if isinstance(leaf, _TensorSlot):
        return _TensorSlot(indices.index(leaf.index)) if leaf.index in indices else _Constant(None)
    if isinstance(leaf, _Carrying):
        return _Carrying(leaf.container.only(indices), leaf.attributes.only(indices))
    return _Dataclass(leaf.cls, leaf.fields.only(indices)) if isinstance(leaf, _Dataclass) else leaf


def _shifted(leaf: _Leaf, count: int) -> _Leaf:
    if isinstance(leaf, _TensorSlot):
        return _TensorSlot(leaf.index + count)
    if isinstance(leaf, _Carrying):
        return _Carrying(leaf.container.shifted(count), leaf.attributes.shifted(count))
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


def without_gradient(name: str) -> InvalidModel:
    """Say of a model that there is nothing to differentiate."""
    return InvalidModel(
        f"no output of {name} requires a gradient, so there is nothing to differentiate; check for detach(), no_grad() "
        "or frozen parameters on the way to the output"
    )
