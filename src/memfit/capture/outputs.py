"""What a model returns, taken apart into tensors and put together again.

Registered containers (tuples, dicts, transformers' `ModelOutput`), dataclasses, and objects of plain classes that hold
tensors (a distribution) are taken apart, with the attributes they have beside what they hold; anything else that is
not a tensor is a constant of the captured call.

Note [The same object]
    What a forward returns or leaves behind at two places is one object: a dictionary that it keeps on itself and
    returns, a tensor that is in two containers. So is what it was given, and a list that the model holds. All values of
    a call are taken apart together (`Parts`), and each such object is made once by every call.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memfit import trees
from memfit.errors import InvalidInput, InvalidModel, first_line
from memfit.trees import is_record


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


@dataclasses.dataclass(frozen=True)
class _Made:
    """A container that is found at several places, see Note [The same object]."""

    number: int
    container: "OutputTemplate"


_Leaf = _TensorSlot | _GivenSlot | _Constant | _Dataclass | _Carrying | _Made


@dataclasses.dataclass(frozen=True)
class OutputTemplate:
    """The shape of a model's output, without its tensors."""

    spec: pytree.TreeSpec
    leaves: tuple[_Leaf, ...]

    def rebuild(
        self, tensors: Sequence[torch.Tensor], given: Sequence[Any] = (), made: dict[int, Any] | None = None
    ) -> Any:
        """Put an output together from the tensors of a call and what it was given.

        `made` are the containers that other values of the same call share with it.
        """
        made = {} if made is None else made
        return pytree.tree_unflatten([_fill(leaf, tensors, given, made) for leaf in self.leaves], self.spec)

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
    parts = Parts([output], given)
    return parts.tensors, parts.output(output)


class Parts:
    """The values of one call, taken apart, see Note [The same object]."""

    def __init__(self, values: Sequence[Any], given: Sequence[Any] = (), kept: Sequence[Any] = ()) -> None:
        """`values` are all that will be taken apart; `given` is what the call gets: tensors, and containers of them.

        `kept` are containers and objects that the model holds, which stay the objects they are.
        """
        self.tensors: list[torch.Tensor] = []
        self._given_things = given
        self._given = {id(each): place for place, each in enumerate(given)}
        self._kept = {id(each): each for each in kept}
        self._taken: set[int] = set()  # places of what is given and found
        self._places: dict[int, int] = {}  # of tensors, by identity
        self._numbers: dict[int, int] = {}  # of containers that are found at several places
        self._several: set[int] = set()
        seen: dict[int, Any] = {}
        for each in values:
            self._look_for_several(each, seen)

    def output(self, value: Any) -> OutputTemplate:
        """Return the template of what the model returns; ValueError if it cannot be made again."""
        template = self.template(value)
        try:
            template.rebuild(self.tensors, self._given_things)
        except Exception as error:
            raise ValueError(
                f"the output, a {type(value).__name__}, cannot be made again from what it holds ({first_line(error)}); "
                "declare all that it holds as fields, or return a dict"
            ) from error
        return template

    def template(self, value: Any) -> OutputTemplate:
        """Take the tensors out of a value and put them behind those that are there."""
        return self._template(value)

    def keep(self, indices: Sequence[int]) -> None:
        """Forget all tensors but these."""
        self.tensors = [self.tensors[index] for index in indices]
        self._places = {id(each): place for place, each in enumerate(self.tensors)}

    def takes_from(self, first: int) -> bool:
        """Return whether values hold something that is given at or behind a place."""
        return any(place >= first for place in self._taken)

    def _look_for_several(self, value: Any, seen: dict[int, Any]) -> None:
        """Note containers that are met for the second time."""
        if isinstance(value, torch.Tensor) or is_constant(value) or self._is_another(value):
            return
        if id(value) in seen:
            self._several.add(id(value))
            return
        seen[id(value)] = value
        for each in (*_held_by(value), *_beside(value).values()):
            self._look_for_several(each, seen)

    def _is_another(self, value: Any) -> bool:
        """Return whether an object is not made by the call."""
        return id(value) in self._given or id(value) in self._kept

    def _template(self, value: Any, opened: Any = None) -> OutputTemplate:
        """Take a value apart, but not what is made once; `opened` is.

        What tells where to stop holds nothing: torch leaves it behind in a cycle, and tensors would live with it.
        """
        known = {*self._several, *self._given, *self._kept}
        inside = None if opened is None else id(opened)

        def stops_at(each: Any) -> bool:
            if id(each) == inside:
                return False
            return id(each) in known or type(each) is torch.Size or bool(_beside(each))

        leaves, spec = pytree.tree_flatten(value, is_leaf=stops_at)
        return OutputTemplate(spec, tuple(map(self._leaf, leaves)))

    def _leaf(self, leaf: Any) -> _Leaf:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in self._given:
                return self._given_slot(leaf)
            return _TensorSlot(self._place_of(leaf))
        if not is_constant(leaf) and self._is_another(leaf):
            return _Constant(leaf) if id(leaf) in self._kept else self._given_slot(leaf)
        if id(leaf) in self._several:
            number = self._numbers.setdefault(id(leaf), len(self._numbers))
            return _Made(number, self._made_alone(leaf))
        return self._own(leaf)

    def _given_slot(self, value: Any) -> _GivenSlot:
        place = self._given[id(value)]
        self._taken.add(place)
        return _GivenSlot(place)

    def _place_of(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._places[id(tensor)]

    def _made_alone(self, value: Any) -> OutputTemplate:
        """Return the template of a container at which others stop."""
        if not _beside(value) and _is_container(value):
            return self._template(value, opened=value)
        _, spec = pytree.tree_flatten(value, is_leaf=lambda _: True)
        return OutputTemplate(spec, (self._own(value),))

    def _own(self, value: Any) -> _Leaf:
        """Describe a value that is no tensor and found here alone."""
        if _beside(value) and _is_container(value):
            inside = self._template(value, opened=value)
            return _Carrying(container=inside, attributes=self.template(_beside(value)))
        if _is_record(value):
            return _Dataclass(type(value), self.template(_fields_of(value) | _beside(value)))
        if not is_constant(value):
            raise ValueError(
                f"the output holds a {type(value).__name__}, whose tensors cannot be found; {_advice(value)}"
            )
        return _Constant(value)


def _is_container(value: Any) -> bool:
    is_one = type(value) in pytree.SUPPORTED_NODES or pytree.is_namedtuple_instance(value)
    return is_one and type(value) is not torch.Size


def _is_record(value: Any) -> bool:
    return (dataclasses.is_dataclass(value) and not isinstance(value, type)) or is_record(value)


def _names_of_fields(record: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(record)] if dataclasses.is_dataclass(record) else []


def _fields_of(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _names_of_fields(record) if hasattr(record, name)}


def _held_by(value: Any) -> list[Any]:
    """Return what lies right in a container or a dataclass."""
    if _is_container(value):
        held: list[Any] = children_of(value)[0]
        return held
    return [*_fields_of(value).values()] if _is_record(value) else []


def children_of(container: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return what lies right in a container, as it is taken apart."""
    if is_record(container):
        return trees.children_of(container)
    own = id(container)  # not the container itself, which torch would leave behind in a cycle
    return pytree.tree_flatten(container, is_leaf=lambda each: id(each) != own)


def _beside(value: Any) -> dict[str, Any]:
    """Return the attributes of a container that are neither fields of it nor under the same name in it."""
    if not _is_record(value) and not isinstance(value, tuple | list | dict):
        return {}
    attributes = getattr(value, "__dict__", {})
    fields = {*_names_of_fields(value)}
    items = value if isinstance(value, dict) else {}
    return {
        name: each
        for name, each in attributes.items()
        if name not in fields and (name not in items or dict.get(items, name) is not each)
    }


def _advice(leaf: Any) -> str:
    if type(leaf).__name__.endswith("Cache"):  # of keys and values, for generating
        return "pass use_cache=False, or set model.config.use_cache = False, as training needs no cache"
    return "return tensors, tuples, dicts or dataclasses of them"


def is_constant(value: Any) -> bool:
    """Whether a value is the same in every call that looks the same: nothing can change inside it."""
    return value is None or issubclass(type(value), _CONSTANTS)  # whatever class it says it is of


_PLAIN = (bool, int, float, complex, str, bytes, Enum, type)
_CONSTANTS = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


def _fill(leaf: _Leaf, tensors: Sequence[torch.Tensor], given: Sequence[Any], made: dict[int, Any]) -> Any:
    if isinstance(leaf, _TensorSlot):
        return tensors[leaf.index]
    if isinstance(leaf, _GivenSlot):
        return given[leaf.index]
    if isinstance(leaf, _Constant):
        return leaf.value
    if isinstance(leaf, _Made):
        if leaf.number not in made:
            made[leaf.number] = leaf.container.rebuild(tensors, given, made)
        return made[leaf.number]
    if isinstance(leaf, _Carrying):
        container = leaf.container.rebuild(tensors, given, made)
        return _with_attributes(container, leaf.attributes.rebuild(tensors, given, made))
    return _with_attributes(object.__new__(leaf.cls), leaf.fields.rebuild(tensors, given, made))


def _with_attributes(instance: Any, attributes: Mapping[str, Any]) -> Any:
    for name, value in attributes.items():
        object.__setattr__(instance, name, value)
    return instance


def _only(leaf: _Leaf, indices: Sequence[int]) -> _Leaf:
    if isinstance(leaf, _GivenSlot):
        return _Constant(None)
    if isinstance(leaf, _TensorSlot):
        return _TensorSlot(indices.index(leaf.index)) if leaf.index in indices else _Constant(None)
    return _inside(leaf, lambda template: template.only(indices))


def _shifted(leaf: _Leaf, count: int) -> _Leaf:
    if isinstance(leaf, _TensorSlot):
        return _TensorSlot(leaf.index + count)
    return _inside(leaf, lambda template: template.shifted(count))


def _inside(leaf: _Leaf, change: Callable[[OutputTemplate], OutputTemplate]) -> _Leaf:
    """Return a leaf with what it holds changed."""
    if isinstance(leaf, _Made):
        return _Made(leaf.number, change(leaf.container))
    if isinstance(leaf, _Carrying):
        return _Carrying(change(leaf.container), change(leaf.attributes))
    return _Dataclass(leaf.cls, change(leaf.fields)) if isinstance(leaf, _Dataclass) else leaf


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
