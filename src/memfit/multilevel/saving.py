"""An engine's state in one file: tensors as safetensors, the rest as JSON in its header."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from memfit.errors import InvalidFile
from memfit.files import atomic_file, parse_json

_KEY = "memfit.multilevel"
_VERSION = 1


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state of nested containers, whole or not at all."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = _taken_apart(state, tensors)
    header = json.dumps({"version": _VERSION, "state": skeleton})
    with atomic_file(path, durable=True) as file:
        file.write(save(tensors, metadata={_KEY: header}))


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            header = parse_json((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InvalidFile(
            f"{path} is not a saved engine ({type(error).__name__}: {error}); give a file that Engine.save wrote"
        ) from None
    if header.get("version") != _VERSION:
        raise InvalidFile(
            f"{path} has the format {header.get('version')}, this version of memfit reads {_VERSION}; update memfit"
        )
    state: dict[str, Any] = _put_together(header["state"], tensors)
    return state


def _taken_apart(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON that names its tensors; containers that JSON does not know are marked."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_taken_apart(key, tensors), _taken_apart(each, tensors)] for key, each in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_taken_apart(each, tensors) for each in value]}
    if isinstance(value, list):
        return [_taken_apart(each, tensors) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidFile(
        f"a {type(value).__name__} stands in the state of the engine and cannot be saved; keep tensors, numbers and "
        "strings in the state of optimizers, schedulers and modules"
    )


def _put_together(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_put_together(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_put_together(each, tensors) for each in content)
    return {_put_together(key, tensors): _put_together(each, tensors) for key, each in content}
