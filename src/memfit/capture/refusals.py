"""Refuse what a forward does while it is traced and a captured call would not do again.

Functions of torch are seen by a mode, functions of Python by another one in their place. What libraries call for
themselves is left alone: the same call of the user's code is what carries something out of the forward.
"""

import builtins
import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch._tensor
from torch.overrides import TorchFunctionMode

from memfit.capture.held import is_foreign

_GRADIENT: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data
_REASONS: dict[Any, str] = {
    _GRADIENT.__get__: "reads .grad of a tensor",
    _GRADIENT.__set__: "sets .grad of a tensor",
    _DATA.__set__: "puts another tensor into .data of one",
    torch.Tensor.retain_grad: "calls retain_grad on a tensor",
    torch.Tensor.register_post_accumulate_grad_hook: "registers a hook on a parameter",
}
_HAND_ON = {torch.overrides.__file__, torch._tensor.__file__}
_SETS_STATE = "sets the state of torch's generator (fork_rng, set_rng_state)"


class Refusals(TorchFunctionMode):
    """Refuses functions of torch that the user's code calls in a forward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REASONS and not is_foreign(_caller().f_code.co_filename):
            refuse(_REASONS[func])
        return func(*args, **(kwargs or {}))


def _caller() -> FrameType:
    """Return the frame that has called a function of torch, behind those that hand it on."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename in _HAND_ON and frame.f_back is not None:
        frame = frame.f_back
    return frame


def refuse(deed: str) -> None:
    """Say what a forward does that a captured call would not do again."""
    raise ValueError(f"the forward {deed}, which a captured call would not do again")


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Refuse all that while a forward is traced by this thread."""
    with (
        _refused(builtins, "print", "prints", by_libraries=False),
        _refused(builtins, "open", "opens a file", by_libraries=False),
        _refused(torch, "set_rng_state", _SETS_STATE),
        _refused(torch.random, "set_rng_state", _SETS_STATE),
        Refusals(),
    ):
        yield


@contextlib.contextmanager
def _refused(home: Any, name: str, deed: str, *, by_libraries: bool = True) -> Iterator[None]:
    """Refuse a function for a while; other threads, and libraries where it is said, call it as always."""
    thread = threading.get_ident()
    function = getattr(home, name)

    def refused(*args: Any, **kwargs: Any) -> Any:
        is_counted = by_libraries or not is_foreign(sys._getframe(1).f_code.co_filename)
        if threading.get_ident() == thread and is_counted:
            refuse(deed)
        return function(*args, **kwargs)

    setattr(home, name, refused)
    try:
        yield
    finally:
        setattr(home, name, function)
