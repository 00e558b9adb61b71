"""Models built where they will live, in the precision they will have, and filled straight from a file.

Note [No second copy]
    `init` makes every tensor on its device in its precision. With `weights=False` parameters have no memory
    at all until `load` makes each one in its place and fills it from the file, so there is never a moment with two.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.errors import InvalidFile, InvalidInput
from memfit.step.tensor_file import TensorFile, write_tensors

_ONE_AT_A_TIME = threading.RLock()  # the default dtype and nn.Module are the whole process's


@contextlib.contextmanager
def init(
    *, device: str | torch.device | None = None, dtype: torch.dtype | None = None, weights: bool = True
) -> Iterator[None]:
    """Build models directly on a device and in a precision; with `weights=False` without memory, for `memfit.load`.

    >>> import torch, memfit
    >>> with memfit.init(dtype=torch.bfloat16):
    ...     model = torch.nn.Linear(4, 4)
    >>> model.weight.dtype
    torch.bfloat16
    """
    if dtype is not None and not dtype.is_floating_point:
        raise InvalidInput(f"models are built in a floating-point dtype, {dtype} was given")
    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        if dtype is not None:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        if device is not None:
            stack.enter_context(torch.device(device))
        if not weights:
            stack.enter_context(_without_memory())
        yield


def load(
    model: nn.Module,
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    device: str | torch.device | None = None,
) -> nn.Module:
    """Fill a model from safetensors files, each tensor straight into its place and in the model's own dtype.

    Parameters that were built without memory are made on `device` (CPU unless told otherwise).
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    sources = {name: file for file in map(TensorFile, map(Path, paths)) for name in file.entries}
    _check_names(model, sources)
    made: dict[int, nn.Parameter] = {}  # by what they replace: tied parameters stay tied
    for module_name, module in model.named_modules():
        for name, tensor in _states(module):
            full_name = f"{module_name}.{name}" if module_name else name
            if tensor.is_meta:
                tensor = _made(module, name, tensor, made, torch.device(device or "cpu"))
            if full_name in sources:
                sources[full_name].copy_into(full_name, tensor)
    return model


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's parameters and buffers into a safetensors file, tied ones once, tensor by tensor."""
    written: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    persistent = model.state_dict()
    for name, tensor in _named_tensors(model):
        if name in persistent and id(tensor) not in written:
            written[id(tensor)] = name
            tensors[name] = tensor
    write_tensors(Path(path), tensors, {"format": "pt"})


def _made(
    module: nn.Module, name: str, tensor: torch.Tensor, made: dict[int, nn.Parameter], device: torch.device
) -> nn.Parameter:
    """A parameter with memory in the place of one without."""
    if id(tensor) not in made:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    module._parameters[name] = made[id(tensor)]
    return made[id(tensor)]


def _states(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    states: dict[str, Any] = {**module._parameters, **module._buffers}
    return [(name, tensor) for name, tensor in states.items() if tensor is not None]


def _check_names(model: nn.Module, sources: dict[str, TensorFile]) -> None:
    """Refuse files of another model before anything is changed."""
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    filled = {id(tensor) for name, tensor in _named_tensors(model) if name in sources}
    missing = [name for name, tensor in _named_tensors(model) if name in own and id(tensor) not in filled]
    unknown = [name for name in sources if name not in own]
    if missing or unknown:
        raise InvalidFile(
            f"the files do not fit this {type(model).__name__}: they lack {_first(missing)} and hold {_first(unknown)} "
            "that the model has not; give the files of this model"
        )
    for name, file in sources.items():
        found, expected = tuple(file.entries[name].shape), tuple(own[name].shape)
        if found != expected:
            raise InvalidFile(
                f"{name!r} has shape {found} in {file.path} and {expected} in the model; give the files of this model"
            )
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise InvalidInput(
            f"the buffer {empty[0]!r} has no memory, and no file fills it; build the model with "
            "memfit.init(weights=False), which leaves only parameters without"
        )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _first(names: list[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else "nothing"


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    """Let every parameter lose its memory when a module gets it; what initialises it then costs nothing."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
