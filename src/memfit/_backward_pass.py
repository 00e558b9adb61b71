"""Tell what the backward pass that is running was asked for.

`torch.autograd.graph._engine_run_backward(outputs, gradients, retain_graph, create_graph, inputs, ...)` is the Python
function under every `backward()` and `grad()`. On a CPU it is on the stack of the thread that runs nodes of autograd; a
device has threads of its own, and then those of all others are looked at.
"""

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

Edge = tuple[Any, int]  # a node of autograd, and one of its outputs

_CODE = _engine_run_backward.__code__
_INPUTS = 3  # among the arguments after the outputs


class Asked(NamedTuple):
    """Where a backward pass starts, and the edges whose gradients are wanted; none: those of all leaves."""

    starts: list[Edge]
    wanted: list[Edge]


def asked() -> list[Asked]:
    """Return what the pass was asked for that runs this thread; where that cannot be told, all that may be it."""
    own = next(_passes(sys._getframe(1)), None)
    if own is not None:
        return [own]
    others = [each for thread, each in sys._current_frames().items() if thread != threading.get_ident()]
    return [found for frame in others for found in _passes(frame)]


def _passes(frame: FrameType | None) -> Iterator[Asked]:
    """Yield the backward passes on a stack, innermost first."""
    while frame is not None:
        if frame.f_code is _CODE:
            values = frame.f_locals
            inputs = values["args"][_INPUTS] if len(values["args"]) > _INPUTS else ()
            yield Asked([*_edges(values["t_outputs"])], [*_edges(inputs)])
        frame = frame.f_back


def _edges(things: Any) -> Iterator[Edge]:
    for each in things:
        if isinstance(each, torch.Tensor) and each.requires_grad:
            each = get_gradient_edge(each)
        if isinstance(each, GradientEdge):
            yield each.node, each.output_nr
