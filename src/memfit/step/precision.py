"""In which precision a step computes.

Note [Casts are not kept]
    Autocast can keep the cast of a parameter for its next use in the same pass. Then a parameter that is used twice
    gets its gradients added up in low precision, which a captured graph does not do. Steps switch that off, so that a
    model computes the same whether it is planned or not.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memfit.errors import InvalidInput

_AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(precision: str | None, device_type: str) -> contextlib.AbstractContextManager[Any]:
    """What the forward pass runs in, see Note [Casts are not kept]."""
    if precision not in _AUTOCAST:
        return contextlib.nullcontext()
    return torch.autocast(device_type, _AUTOCAST[precision], cache_enabled=False)


def in_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    """What a model with bf16 parameters can take."""
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def make_pure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Bring parameters and buffers to bf16 in place; the optimizer keeps its parameters."""
    if all(each.dtype is torch.bfloat16 for each in model.parameters()):
        return
    if any(each.get("step") for each in optimizer.state.values()):
        raise InvalidInput(
            'precision="pure-bf16" was given for an optimizer that has stepped in another precision already; make the '
            "step before the first update, or build the model with memfit.init(dtype=torch.bfloat16)"
        )
    model.to(torch.bfloat16)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = in_bfloat16(value)


class Scaler:
    """Scales fp16 losses so that gradients do not vanish, and finds updates that overflow."""

    def __init__(self, device_type: str) -> None:
        self._scaler = torch.amp.GradScaler(device_type)

    def scaled(self, seed: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self._scaler.scale(seed)
        return scaled

    def unscale(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Bring gradients to their true size, in place; whether all are finite. The scale follows."""
        gradients: Any = _Gradients(parameters)
        if all(parameter.grad is None for parameter in parameters):
            return True
        self._scaler.unscale_(gradients)
        self._scaler.step(gradients)
        self._scaler.update()
        return bool(gradients.are_finite)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)


class _Gradients:
    """Stands for an optimizer before a GradScaler, which lets it step if all gradients are finite."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.param_groups = [{"params": parameters}]
        self.are_finite = False

    def step(self) -> None:
        self.are_finite = True
