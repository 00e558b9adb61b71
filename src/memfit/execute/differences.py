"""In which way a call differs from one that was captured before, in words."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_LAYOUT = ("shape", "strides", "dtype", "device", "requires a gradient")


def difference(before: Any, now: Any, names: Sequence[str], modules: Sequence[nn.Module]) -> str:
    """Say what differs between two kinds of calls (`execute/kinds.py`); `names` are those of their tensors."""
    if before[0] != now[0]:
        return "parts of the model were replaced"
    for module, was, mode in zip(modules, before[1], now[1], strict=True):
        if was != mode:
            return f"{type(module).__name__} is now in {'train' if mode else 'eval'} mode"
    if len(before[2]) == len(now[2]):
        for place, (was, layout) in enumerate(zip(before[2], now[2], strict=True)):
            if was != layout:
                return _layouts(names[place] if place < len(names) else f"tensor {place}", was, layout)
    if before[3] != now[3]:
        return "other tensors, lists or dictionaries than before are given twice"
    if before[5] == now[5]:
        for was, constant in zip(before[4], now[4], strict=True):
            if was != constant:
                return f"an argument was {_constant(was)} and is {_constant(constant)}"
    if before[6] != now[6]:
        return "autocast, the default dtype, deterministic algorithms or the kernels of attention are set otherwise"
    return "its arguments are passed in another way"


def _layouts(name: str, was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    place = next(place for place in range(len(was)) if was[place] != now[place])
    if isinstance(now[place], bool):
        return f"{name} {'now' if now[place] else 'no longer'} {_LAYOUT[place]}"
    return f"the {_LAYOUT[place]} of {name} was {_words(was[place])} and is {_words(now[place])}"


def _words(value: Any) -> str:
    return str(list(value)) if isinstance(value, torch.Size | tuple) else str(value)


def _constant(described: Any) -> str:
    """A constant as `attach` writes it down: its type, and its value."""
    if described is None:
        return "a tensor"
    kind, value = described
    return repr(float.fromhex(value) if kind is float else value)
