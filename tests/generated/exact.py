"""How far eager's own gradients are from those of the same step in float64.

Where a sum takes numbers that cancel, such as the gradient of what a softmax adds up to, eager's gradients are nothing
but what rounding left, and those of any other order of adding are others.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from generated.loops import train
from generated.specs import Spec

Seen = dict[str, torch.Tensor | None]


def gradients_in_float64(spec: Spec, make: Callable[[Spec], nn.Module]) -> Seen | None:
    """Those of the first step; None where the model does not run in float64 or draws other numbers there."""
    plain = dataclasses.replace(spec, loop=dataclasses.replace(spec.loop, autocast=False))
    model = make(spec).double()
    model.register_forward_pre_hook(_in_float64, with_kwargs=True)
    with contextlib.suppress(Exception):  # whatever it is, there is nothing to compare with
        return next(train(plain, model))
    return None


def _in_float64(_model: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return pytree.tree_map(cast, (args, kwargs))


def farthest(own: Seen, exact: Seen, beginning: str) -> float:
    """The largest difference of what has names that begin so, relative to the largest number of `own`."""
    scale = far = 0.0
    for name, one in own.items():
        other = exact.get(name)
        if name.startswith(beginning) and one is not None and other is not None and one.numel():
            scale = max(scale, float(one.double().nan_to_num().abs().max()))
            far = max(far, float((one.double() - other.double()).nan_to_num().abs().max()))
    return far / scale if scale else 0.0
