"""Refuse to ask for the gradients of outputs that other outputs are computed from.

Note [Inner outputs]
    A captured call is one node of autograd. A feature that is returned beside what is computed from it gets only those
    gradients that come from outside; those on the way back through the call do not pass its hooks, and `retain_grad`
    would not see them. So on such a tensor both say so. `torch.autograd.grad(loss, feature)` and
    `backward(inputs=[feature])` would get the gradient from outside alone, or none: so the other outputs are tied to
    the feature by a node that hands on what it gets, and looks what the backward pass was asked for.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from memfit._backward_pass import asked
from memfit.capture.hooks import is_of_the_user
from memfit.errors import ExecutionError

REFUSED = ("register_hook", "retain_grad")


def refuse_gradients(tensors: list[Any], inner: Sequence[int], others: Sequence[int]) -> None:
    """Let outputs refuse hooks, and others say so where the gradient of one is asked for, see Note [Inner outputs].

    `inner` are places in the order in which they are computed, `others` those of all other outputs.
    """
    features = [tensors[place] for place in inner]
    bases = {id(each._base) for each in tensors if isinstance(each, torch.Tensor) and each._is_view()}
    for number, place in enumerate(inner):
        if number and id(tensors[place]) not in bases:
            tensors[place] = features[number] = _tied(tensors[place], features[:number])
        for name in REFUSED:
            setattr(tensors[place], name, _Refused(tensors[place], name))
    for place in others:
        tensors[place] = _tied(tensors[place], features)


def _tied(tensor: torch.Tensor, features: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an output with a node of its own; a view of a feature has one that leads there."""
    if tensor._is_view() and any(tensor._base is each for each in features):
        return tensor
    tied: torch.Tensor = _Tied.apply(tensor, *features)
    return tied


class _Tied(torch.autograd.Function):
    """An output with a node of its own, which its gradient passes, and by which those of features would be reached."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *features: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.detach()  # a view of it could not be written into

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        features = {*ctx.next_functions[1:]}
        if any(edge in features for each in asked() for edge in each.wanted):
            raise ExecutionError(_ASKED)
        return gradients[0], *[None] * (len(ctx.next_functions) - 1)


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


_ASKED = (
    "the gradient of an output is asked for (torch.autograd.grad, or backward with inputs=) from which other outputs "
    "are computed; in a captured call their gradients do not pass it: fit the parts before and behind it, each by "
    "itself, or call memfit.remove(model)"
)
