"""Let parameters get their gradients one after the other, as in eager.

Note [Order of gradients]
    A captured backward pass returns all gradients at once, and autograd hands them out in an order of its own. Who has
    put hooks on parameters sees that. So where one has a hook, the call is given views of all that gets a gradient,
    made in the opposite order of that in which gradients arrived while the call was traced: of what is ready autograd
    runs what was made last, and hands each gradient on to its parameter at once. Calls that write into parameters are
    given no views, into which they could not write.

Note [When to look for hooks]
    Looking at every parameter takes a microsecond for ten of them. So that is only done where a hook was registered
    anywhere since the last time, or where parameters may be others.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit import _torch
from memfit.capture.trace import Joint
from memfit.execute.fan import Slot, fan

_hooks = operator.attrgetter("_backward_hooks")
_later_hooks = operator.attrgetter("_post_accumulate_grad_hooks")


class GradientOrder:
    """Says what to give to a call, see Note [Order of gradients]."""

    def __init__(self, joint: Joint) -> None:
        self._places = [] if joint.changes_parameters else joint.arrivals
        self._registered: int | None = None
        self._is_seen = False  # whether somebody sees the order

    def look_again(self) -> None:
        """Look for hooks at the next call, see Note [When to look for hooks]."""
        self._registered = None

    def of(self, given: Sequence[Any], slots: Mapping[int, Slot]) -> list[Any]:
        """Return what is given, or views of it; `slots` are for what goes in through a `Fan`, by identity."""
        registered = _torch.hooks_registered()
        if registered != self._registered:
            tensors = [given[place] for place in self._places]
            self._is_seen = any(map(_hooks, tensors)) or any(map(_later_hooks, tensors))
            self._registered = registered
        if not torch.is_grad_enabled() or not (self._is_seen or slots):
            return [*given]
        return self._views(given, slots)

    def _views(self, given: Sequence[Any], slots: Mapping[int, Slot]) -> list[Any]:
        # Of what is given twice, the last gradient counts.
        last = {id(given[place]): given[place] for place in dict.fromkeys(reversed(self._places))}
        views: dict[int, torch.Tensor] = {}
        for key, each in last.items():
            if key in slots:
                views[key] = fan(slots[key], each)
            elif self._is_seen:
                views[key] = each.view_as(each)
        return [views.get(id(each), each) for each in given]
