"""Say where gradients of several calls are added in another order than in eager.

Note [Several calls]
    Eager adds the gradients of all uses of a parameter one by one. A captured call adds those of its own uses first. If
    it uses a parameter several times, and several calls go back in one backward pass, the sum is rounded otherwise.
    That is said once: last bits may differ.
"""

import warnings
from typing import Any

import torch

from memfit import _torch


class SeveralCalls:
    """Watches backward passes of a call that uses a parameter several times, see Note [Several calls]."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: int | None = None
        self._is_said = False

    def watch(self, output: torch.Tensor) -> None:
        """Look whether this call goes back together with another one."""
        node = None if self._is_said else _torch.compiled_node(output)
        if node is not None:
            _torch.before_backward(node, self._look)

    def _look(self, _gradients: Any) -> None:
        now = _torch.backward_pass()
        if now == self._last and not self._is_said:
            self._is_said = True
            warnings.warn(
                f"several calls go back in one backward pass, and each uses {self._name} several times: gradients are "
                "added call by call, in another order than in eager, so that last bits may differ",
                stacklevel=2,
            )
        self._last = now
