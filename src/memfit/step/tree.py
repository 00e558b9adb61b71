"""Nested state in two parts: its tensors by name, and everything else as JSON.

What JSON cannot hold is marked with a word in a dict: {"tensor": name}, {"tuple": [...]}, {"pairs": [[key, value]]} for
mappings, {"counter": [[key, count]]}, {"dtype": name}, {"wrapped": class, ...} for the quantized state of torchao's
optimizers. Nothing that is read can run code: classes are those of a list.
"""

import importlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.errors import InvalidFile, InvalidInput

_NUMBERS = (str, bool, int, float, type(None))
_WRAPPED = {  # classes that hold a tensor in several, by name
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}


def take_apart(tree: Any, path: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """Separate tensors, named by their place in the tree, from the rest. Shared ones are named once."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}

    def encode(value: Any, path: str) -> Any:
        if type(value).__name__ in _WRAPPED:
            names, context = value.__tensor_flatten__()
            held = {name: encode(getattr(value, name), f"{path}.{name}") for name in names}
            return {"wrapped": type(value).__name__, "tensors": held, "context": encode(list(context), path)}
        if isinstance(value, torch.Tensor):
            return {"tensor": name_of(value, path)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, Counter):
            return {"counter": [[encode(key, path), count] for key, count in value.items()]}
        if isinstance(value, Mapping):
            pairs = [[encode(key, path), encode(item, f"{path}.{key}")] for key, item in value.items()]
            return {"pairs": pairs}
        if isinstance(value, tuple):
            return {"tuple": [encode(item, f"{path}.{index}") for index, item in enumerate(value)]}
        if isinstance(value, list):
            return [encode(item, f"{path}.{index}") for index, item in enumerate(value)]
        if type(value) in _NUMBERS:
            return value
        raise InvalidInput(
            f"{path!r} holds a {type(value).__name__}, which cannot be saved without running code when it is loaded; "
            "keep numbers, strings and tensors in the state of model, optimizer and scheduler"
        )

    def name_of(tensor: torch.Tensor, path: str) -> str:
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in names or not tensor.numel():
            names[key] = path
            tensors[path] = tensor
        return names[key]

    return encode(tree, path), tensors


def put_together(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The tree again; `tensor` finds one by its name."""
    if isinstance(tree, list):
        return [put_together(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.keys() == {"tensor"}:
        return tensor(tree["tensor"])
    if tree.keys() == {"tuple"}:
        return tuple(put_together(item, tensor) for item in tree["tuple"])
    if tree.keys() == {"pairs"}:
        return OrderedDict((put_together(key, tensor), put_together(item, tensor)) for key, item in tree["pairs"])
    if tree.keys() == {"counter"}:
        return Counter({put_together(key, tensor): count for key, count in tree["counter"]})
    if tree.keys() == {"dtype"} and isinstance(getattr(torch, tree["dtype"], None), torch.dtype):
        return getattr(torch, tree["dtype"])
    if tree.keys() == {"wrapped", "tensors", "context"} and tree["wrapped"] in _WRAPPED:
        held = {name: put_together(item, tensor) for name, item in tree["tensors"].items()}
        return _wrapped(tree["wrapped"], held, put_together(tree["context"], tensor))
    raise InvalidFile(f"the state holds an entry that is not known ({', '.join(map(str, tree))}); it may be too new")


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own with the same values, also of a class of the list."""
    if type(tensor).__name__ not in _WRAPPED:
        return tensor.detach().clone()
    whole: Any = tensor
    names, context = whole.__tensor_flatten__()
    return _wrapped(type(tensor).__name__, {name: getattr(whole, name).clone() for name in names}, context)


def _wrapped(name: str, held: dict[str, Any], context: Any) -> torch.Tensor:
    """Put an object of a class of the list together; tensors that are still in a file are read for it."""
    kind: Any = getattr(importlib.import_module(_WRAPPED[name]), name)
    tensors = {key: value if isinstance(value, torch.Tensor) else value.read() for key, value in held.items()}
    whole: torch.Tensor = kind.__tensor_unflatten__(tensors, context, None, None)
    return whole
