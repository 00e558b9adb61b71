"""Constructors that ask for values, while nothing has one.

Note [Questions of constructors]
    A model that is built without weights has shapes and no values, but its constructor may ask
    for one. Two kinds of questions have an answer. A number that was computed from nothing but
    constants (the widths of a RegNet, the drop rates of a ViT) is computed beside the model, for
    real, because the structure of the model depends on it. And `torch.nn.init` asks about what it
    is just drawing (whether to draw again): any answer does, because nothing but values depends
    on it. Every other question fails.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit import _torch
from memfit.capture.record import KnownValues
from memfit.tensors import tensors_in

_LARGEST_NUMEL = 1024  # of what is computed for real: lists of numbers, not weights
_ASK = torch.ops.aten._local_scalar_dense.default


class Construction(TorchDispatchMode):
    """Answers what can be answered, see Note [Questions of constructors]."""

    def __init__(self) -> None:
        super().__init__()
        self._known = KnownValues()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ASK:
            if _asked_by_initialization():
                return 0.0 if args[0].is_floating_point() else 0
            answer = self._known.answer(args[0])
            if answer is not None:
                return answer
        try:
            result = func(*args, **kwargs)
        except _torch.DynamicOutputShapeException:
            result = self._known.made(func, args, kwargs)
            if result is None:
                raise
            return result
        _forget_constants(result)
        if all(tensor.numel() <= _LARGEST_NUMEL for tensor in tensors_in(result)):
            self._known.follow(func, args, kwargs, result)
        return result


def _forget_constants(result: Any) -> None:
    """Take from fake tensors the real ones that they keep beside them, which cannot be copied where nothing is real."""
    for tensor in tensors_in(result):
        if isinstance(tensor, _torch.FakeTensor):
            tensor.constant = None


def _asked_by_initialization() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == torch.nn.init.__name__:
            return True
        frame = frame.f_back
    return False
