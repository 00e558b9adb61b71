"""Answer what a forward asks about its own tensors in a trace as the eager run answers it.

Note [Tensors as they are]
    In a trace, tensors are of a class of torch's, and have none of the attributes that users put on parameters. So
    while a forward is traced, the user's modules get another `type`, which knows of what class each tensor is in the
    eager run. `__class__`, which `isinstance` reads, too, says the same. Attributes of parameters and buffers are read
    from the model's own, and compared before every call as everything that was read (`reads.py`).
"""

import builtins
import contextlib
import dis
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memfit.capture.held import is_plain
from memfit.capture.record import in_library

Note = Callable[[str, Any, str, Any], None]  # path, home, name, value
_ABSENT: Any = object()
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_current: list["Originals"] = []


class AttributesOf:
    """Read attributes of whatever parameter or buffer has a name in a model."""

    def __init__(self, registry: Mapping[str, torch.Tensor | None], name: str) -> None:
        self._registry, self._name = registry, name

    def __getitem__(self, name: str) -> Any:
        return self._registry[self._name].__dict__[name]

    def __contains__(self, name: str) -> bool:
        return self.get(name, _ABSENT) is not _ABSENT

    def get(self, name: str, absent: Any = None) -> Any:
        """Return an attribute, or what stands for none."""
        return getattr(self._registry.get(self._name), "__dict__", {}).get(name, absent)


class Originals:
    """The tensors of the user in whose place a forward is given traced ones."""

    def __init__(self, model: nn.Module, note: Note, note_absent: Note) -> None:
        self._note, self._note_absent = note, note_absent
        self._by_id: dict[int, torch.Tensor] = {}  # of traced ones
        self._kept: list[torch.Tensor] = []
        homes: dict[int, tuple[str, AttributesOf]] = {}
        for path, module in model.named_modules():
            for registry in (module._parameters, module._buffers):
                for name, each in registry.items():
                    homes.setdefault(id(each), (f"{path}.{name}".lstrip("."), AttributesOf(registry, name)))
        self._homes = homes

    def stand_in(self, traced: Sequence[Any], own: Sequence[Any]) -> None:
        """Let traced tensors be taken for the user's own."""
        for one, other in zip(traced, own, strict=True):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                self._by_id[id(one)] = other
                self._kept.append(one)

    def class_of(self, tensor: torch.Tensor) -> type:
        """Return the class that a tensor is of in the eager run."""
        own = self._by_id.get(id(tensor))
        return torch.Tensor if own is None else type(own)

    def attribute(self, tensor: torch.Tensor, name: str) -> Any:
        """Return what the user has put on a parameter or buffer; AttributeError if that is nothing."""
        own = self._by_id.get(id(tensor))
        path, home = self._homes.get(id(own), ("", None))
        if own is None or home is None:
            raise AttributeError(name)
        value = own.__dict__.get(name, _ABSENT)
        if value is _ABSENT:
            self._note_absent(f"{path}.{name}", home, name, None)
            raise AttributeError(f"{type(own).__name__!r} object has no attribute {name!r}")
        if not is_plain(value):
            raise ValueError(
                f"the forward reads {path}.{name}, a {type(value).__name__}, which a captured call would not see "
                "change; keep it on the module"
            )
        self._note(f"{path}.{name}", home, name, value)
        return value

    @contextlib.contextmanager
    def answering(self, codes: Iterable[tuple[types.CodeType, dict[str, Any]]]) -> Iterator[None]:
        """Answer by them what code asks, see Note [Tensors as they are]."""
        classes = {type(each) for each in self._kept} - {*_PLAIN}
        homes = {id(around): around for _, around in codes if "type" not in around}
        before = [(cls, cls.__dict__.get("__getattribute__")) for cls in classes]
        for cls in classes:
            _read_by(cls, self._reading(cls.__getattribute__))
        for around in homes.values():
            around["type"] = AskedType
        _current.append(self)
        try:
            yield
        finally:
            _current.remove(self)
            self._by_id.clear()
            self._kept.clear()  # whose hooks lead back to the trace
            for around in homes.values():
                around.pop("type", None)
            for cls, own in before:
                if own is None:
                    del cls.__getattribute__
                else:
                    _read_by(cls, own)

    def _reading(self, read: Any) -> Callable[[Any, str], Any]:
        """Return what reads the attributes of a traced tensor."""

        def reading(tensor: Any, name: str) -> Any:
            if name == "__class__":
                own = self._by_id.get(id(tensor))
                if own is not None and type(own) is not torch.Tensor:
                    return type(own)
                return read(tensor, name) if in_library(sys._getframe(1).f_code.co_filename) else torch.Tensor
            try:
                return read(tensor, name)
            except AttributeError:
                if name.startswith("__") or in_library(sys._getframe(1).f_code.co_filename):
                    raise
            return self.attribute(tensor, name)

        return reading


class _Asked(type):
    """Answer `type` where the user's modules ask it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        found = type(args[0])
        if found is type:
            return cls
        if _current and issubclass(found, torch.Tensor) and found not in _PLAIN:
            return _current[-1].class_of(args[0])
        return found

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)


class AskedType(type, metaclass=_Asked):
    """Stands for `type` in the user's modules, see Note [Tensors as they are]."""


def check_no_identities(code: types.CodeType, around: Mapping[str, Any], names: set[str]) -> None:
    """Refuse code that asks whether tied weights are one; `names` are those that they have in their modules.

    In a trace they are two, each with a gradient of its own.
    """
    if not names.intersection(code.co_names):
        return
    before: dis.Instruction | None = None
    value: Any = _ABSENT  # of what was loaded last, if that is known
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_CONST":
            value = each.argval
        elif each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = around.get(each.argval, getattr(builtins, str(each.argval), _ABSENT))
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            value = getattr(value, str(each.argval), _ABSENT)
        elif each.opname == "IS_OP" and (value is _ABSENT or isinstance(value, torch.Tensor)):
            _refuse_identity(code, before)
        elif each.opname not in ("PRECALL", "CACHE"):
            value = _ABSENT
        if each.opname == "LOAD_GLOBAL" and value is id:
            _refuse_identity(code, each)
        before = each


def _refuse_identity(code: types.CodeType, where: dis.Instruction | None) -> None:
    line = None if where is None or where.positions is None else where.positions.lineno
    raise ValueError(
        f"{code.co_name} asks whether two objects are the same (line {line or code.co_firstlineno}), which tied "
        "weights are not in a captured call; decide that when the model is made"
    )


def _read_by(cls: Any, function: Any) -> None:
    cls.__getattribute__ = function
