"""Refuse hooks on outputs that other outputs are computed from.

Note [Inner outputs]
    A captured call is one node of autograd. A feature that is returned beside what is computed from it gets only those
    gradients that come from outside; those on the way back through the call do not pass its hooks, and `retain_grad`
    would not see them. So on such a tensor both say so.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from memfit.capture.hooks import is_of_the_user
from memfit.errors import ExecutionError

REFUSED = ("register_hook", "retain_grad")


def refuse_hooks(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> None:
    """Let outputs refuse hooks, see Note [Inner outputs]."""
    for place in places:
        for name in REFUSED:
            setattr(tensors[place], name, _Refused(tensors[place], name))


class _Refused:
    """Stand for a method of a tensor."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self._tensor = weakref.ref(tensor)  # which holds this
        self._name = name

    def __reduce__(self) -> Any:
        return _Refused, (torch.empty(0), self._name)

    def __call__(self, *hook: Any) -> Any:
        if hook and not is_of_the_user(hook[0]):
            return torch.Tensor.register_hook(self._tensor(), hook[0])  # type: ignore[arg-type]
        raise ExecutionError(
            f"{self._name} is called on an output from which other outputs are computed; in a captured call their "
            "gradients do not pass it: put the hook on a value inside of the forward, or fit the parts before and "
            "behind it"
        )
