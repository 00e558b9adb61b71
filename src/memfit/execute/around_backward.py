"""Say where a backward pass runs in another way than its captured call was made for.

Note [Autocast and backward passes]
    A captured backward pass runs as torch asks for it: outside of an autocast block, where formulas of autograd do not
    cast. Inside of one eager casts in them, too, and rounds otherwise. In one block eager casts a weight once for all
    calls, and adds up the gradients of that cast in few bits; captured calls cast it each for itself. Both are said
    once; the last bits, or those of the lower precision, may differ. So may they where the kernels of matrix products
    or convolutions are switched between the passes: what is computed again runs by others than eager's forward pass.
"""

import warnings
from typing import Any

import torch

from memfit import _torch
from memfit.accelerator import kinds


class AroundBackward:
    """Watches the backward passes of a call, see Note [Autocast and backward passes]."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: int | None = None  # pass in which a call shares casts with others
        self._said: set[str] = set()

    def watch(self, output: torch.Tensor) -> None:
        """Look before the backward pass behind an output."""
        node = _torch.compiled_node(output)
        if node is None:
            return
        kernels = _kernels()
        shares_casts = _is_autocast() and torch.is_autocast_cache_enabled()

        def look(_gradients: Any) -> None:
            if _is_autocast():
                self._say(
                    f"backward() runs inside an autocast block, where eager casts in that of {self._name}, "
                    "too, and a captured call does not; call it outside of the block, as torch asks for"
                )
            if _kernels() != kernels:
                self._say(
                    "torch.backends.mkldnn or the precision of matrix products was switched between forward and "
                    f"backward of {self._name}: what a captured call computes again differs from eager in the last "
                    "bits; switch it before the forward pass"
                )
            if shares_casts:
                now = _torch.backward_pass()
                if now == self._last:
                    self._say(
                        f"several calls of {self._name} under autocast go back in one pass: eager casts a weight once "
                        "for all of them and adds its gradients in few bits, captured calls do not; use "
                        "torch.autocast(..., cache_enabled=False), under which both do the same"
                    )
                self._last = now

        _torch.before_backward(node, look)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=2)


def _kernels() -> tuple[object, ...]:
    return torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()


def _is_autocast() -> bool:
    return any(torch.is_autocast_enabled(device) for device in kinds())
