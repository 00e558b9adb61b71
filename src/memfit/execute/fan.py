"""Hand what a call uses several times to it through a node of its own, see Note [One by one] in `uses.py`."""

from collections.abc import Sequence
from typing import Any

import torch

from memfit._backward_pass import Edge

AS_TRACED, BEGUN, APART = "as traced", "begun", "apart"  # how a call adds: by itself, to what is given, not at all


class Slot:
    """Gather the gradients of one tensor that a call uses several times, see Note [One by one]."""

    def __init__(self, edges: int) -> None:
        self.edges = edges
        self.forget()

    def forget(self, now: int | None = None) -> None:
        """Begin a backward pass of which nothing is known."""
        self.known_in = now
        self.mode = AS_TRACED
        self.follower: Slot | None = None  # takes the sum of this one
        self.start: torch.Tensor | None = None
        self.others: Sequence[torch.Tensor | None] = ()  # gradients beside the first


class Fan(torch.autograd.Function):
    """A tensor on its way into a call, see Note [One by one]."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        return tensors[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        slot: Slot = ctx.slot
        others, slot.others = slot.others, ()
        if slot.follower is not None:
            slot.follower.start = gradients[0]
            gradients = (None,)
        rest = (None,) * (slot.edges - 1 - len(others))
        return (None, *gradients, *others, *rest)


def fan(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a call takes it."""
    taken: torch.Tensor = Fan.apply(slot, *[tensor] * slot.edges)
    return taken


def variable_behind(node: Any) -> Any:
    """Return the parameter to which a node of autograd hands a gradient, also through a `Fan`; None if it is none."""
    if is_fan(node):
        node = edge_of(node)[0]
    return getattr(node, "variable", None)


def is_fan(node: Any) -> bool:
    """Return whether a node of autograd stands before what a call uses several times."""
    return getattr(node, "_forward_cls", None) is Fan


def edge_of(node: Any) -> Edge:
    """Return where a `Fan` hands its gradients."""
    edge: Edge = next(each for each in node.next_functions if each[0] is not None)
    return edge
