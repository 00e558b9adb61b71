"""Parameters and buffers of a model, as captured calls are given them and as a forward leaves them."""

import torch
from torch import nn


def first_names(model: nn.Module) -> dict[str, str]:
    """Return for every name of a parameter the first that the same parameter has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(each), name) for name, each in model.named_parameters(remove_duplicate=False)}


def state_names(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers in the order in which captured calls are given them."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [name for name, _ in named]


def states_of_calls(model: nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers in the order in which captured calls are given them."""
    parameters = [each for _, each in model.named_parameters(remove_duplicate=False)]
    return parameters + [each for _, each in model.named_buffers(remove_duplicate=False)]


def buffers_by_place(model: nn.Module) -> dict[tuple[int, str], torch.Tensor]:
    """Return all buffers by module and name."""
    return {
        (id(module), name): buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def keep_buffers(model: nn.Module, before: dict[tuple[int, str], torch.Tensor]) -> None:
    """Write into a buffer what a forward put in its place: only what is written is traced."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            old = before.get((id(module), name))
            if buffer is old or buffer is None:
                continue
            if old is None:
                raise ValueError(f"the buffer {name!r} is first registered in a forward; register it before")
            if (old.shape, old.dtype) != (buffer.shape, buffer.dtype):
                raise ValueError(f"the buffer {name!r} is given a tensor of another shape or dtype; write into it")
            with torch.no_grad():
                old.copy_(buffer)
            module._buffers[name] = old
