"""Say where a loop keeps gradients that a budget does not count.

Note [Gradients that stay]
    A budget is planned for a step that begins without gradients. A loop that accumulates them holds a whole set when
    the next step begins, and a captured backward pass makes another one. The first calls look whether that is so; if
    the budget has no room for it, a warning says how much more it takes, and how to have it counted. What a peak may be
    off by anyway is not spoken of.
"""

import warnings
from collections.abc import Sequence

import torch

from memfit.tensors import storage_bytes
from memfit.units import format_bytes

_UNSPOKEN_SHARE, _UNSPOKEN_BYTES = 0.01, 4096  # of a budget
_LOOKS = 8  # calls; a loop that accumulates does so from its second call on


class KeptGradients:
    """Watches the first calls under a budget, see Note [Gradients that stay]."""

    def __init__(self, budget_bytes: int, peak_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._peak_bytes = peak_bytes
        self._looks = _LOOKS

    def look(self, states: Sequence[torch.Tensor]) -> bool:
        """Look at the gradients of parameters before a call; return whether to look again at the next one."""
        gradients = [each.grad for each in states if each.requires_grad and each.is_leaf and each.grad is not None]
        kept_bytes = storage_bytes(gradients)
        over_bytes = self._peak_bytes + kept_bytes - self._budget_bytes
        if kept_bytes and over_bytes > self._budget_bytes * _UNSPOKEN_SHARE + _UNSPOKEN_BYTES:
            warnings.warn(
                f"gradients of an earlier backward pass take {format_bytes(kept_bytes)} beside this step, so that it "
                f"is up to {format_bytes(over_bytes)} over its budget of {format_bytes(self._budget_bytes)}, which "
                "does not count them; set them to None before the forward pass (optimizer.zero_grad()), or count them: "
                'memfit.fit(..., loop=memfit.Loop(gradients="kept"))',
                stacklevel=2,
            )
            return False
        self._looks -= 1
        return self._looks > 0
