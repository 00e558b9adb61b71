"""The precision a level computes in, and the scale that keeps small fp16 gradients from vanishing."""

import contextlib
from typing import Any

import torch

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_GROWTH_INTERVAL = 2000  # steps without overflow before the scale grows, as torch.amp.GradScaler has it


class LossScale:
    """Multiplies losses before their backward pass, so that fp16 gradients do not vanish.

    Unlike `torch.amp.GradScaler` it does not unscale inside an optimizer: gradients of several passes and several
    levels meet before the step, so each is unscaled where it is made, and only the overflow is looked for.
    """

    def __init__(self, initial: float, growth: float) -> None:
        self.scale = initial
        self._growth = growth
        self._since_overflow = 0

    def update(self, *, overflowed: bool) -> None:
        """Lower the scale after an overflow, raise it after many steps without."""
        self._since_overflow = 0 if overflowed else self._since_overflow + 1
        if overflowed:
            self.scale /= self._growth
        elif self._since_overflow == _GROWTH_INTERVAL:
            self.scale *= self._growth
            self._since_overflow = 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "since_overflow": self._since_overflow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self._since_overflow = state["scale"], state["since_overflow"]


class Mixed:
    """Autocast for the passes of one problem; under fp16 with a loss scale."""

    def __init__(self, precision: str, device_type: str, *, initial_scale: float, growth: float) -> None:
        self.dtype = _DTYPES.get(precision)
        self.device_type = device_type
        self.scaler = LossScale(initial_scale, growth) if precision == "fp16" else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    @property
    def scale(self) -> float:
        """What losses are multiplied by before their backward pass."""
        return self.scaler.scale if self.scaler is not None else 1.0
