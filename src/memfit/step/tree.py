"""Nested state in two parts: its tensors by name, and everything else as JSON.

What JSON cannot hold is marked with a word in a dict: {"tensor": name}, {"tuple": [...]}, {"pairs": [[key, value]]} for
dicts with keys that are not strings, {"counter": [[key, count]]}. Nothing that is read can run code.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.errors import InvalidFile, InvalidInput

_NUMBERS = (str, bool, int, float, type(None))


def take_apart(tree: Any, path: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """Separate tensors, named by their place in the tree, from the rest. Shared ones are named once."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}

    def encode(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": name_of(value, path)}
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
    raise InvalidFile(f"the state holds an entry that is not known ({', '.join(map(str, tree))}); it may be too new")
