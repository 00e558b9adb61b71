"""Refuse what a forward does while it is traced and a captured call would not do again.

Functions of torch are seen by a mode, functions of Python by another one in their place. What libraries call for
themselves is left alone: the same call of the user's code is what carries something out of the forward. Lines that are
logged are refused from the second trace of a forward on: many are said once.
"""

import builtins
import contextlib
import logging
import os.path
import pathlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch._tensor
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from memfit.capture import asked
from memfit.capture.checks import one_hot
from memfit.capture.held import is_foreign
from memfit.capture.record import short_line

_GRADIENT: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data
_REASONS: dict[Any, str] = {
    _GRADIENT.__get__: "reads .grad of a tensor",
    _GRADIENT.__set__: "sets .grad of a tensor",
    _DATA.__set__: "puts another tensor into .data of one",
    torch.Tensor.retain_grad: "calls retain_grad on a tensor",
    torch.Tensor.register_post_accumulate_grad_hook: "registers a hook on a parameter",
}
_VERSION: Any = torch.Tensor._version
_IS_LEAF: Any = torch.Tensor.is_leaf
_GRAD_FN: Any = torch.Tensor.grad_fn
_OF_ARGUMENTS: dict[Any, str] = {
    torch.Tensor.storage_offset: "storage_offset()",
    torch.Tensor.data_ptr: "data_ptr()",
    _VERSION.__get__: "_version",
    _IS_LEAF.__get__: "is_leaf",
    _GRAD_FN.__get__: "grad_fn",
}
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
_ASKS_FOR_GRADIENTS = {torch.Tensor.requires_grad_, _REQUIRES_GRAD.__set__}
_HAND_ON = {torch.overrides.__file__, torch._tensor.__file__, asked.__file__}


class Refusals(TorchFunctionMode):
    """Refuses functions of torch that the user's code calls in a forward; notes hooks that it puts on values."""

    def __init__(self, given: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._given = {id(each) for each in given}  # arguments, which are in a trace others than the user's
        self.hooks: list[Any] = []  # on values
        self.asking_for_none: list[Any] = []  # functions that want None where no gradient arrives, as autograd has them

    def noting_none(self) -> Callable[[Any, bool], None]:
        """Return what notes calls of `set_materialize_grads` beside doing what it does."""
        set_it = FunctionCtx.set_materialize_grads

        def noted(ctx: Any, value: bool) -> None:
            if not value:
                self.asking_for_none.append(ctx)
            set_it(ctx, value)

        return noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REASONS and not is_foreign(_caller().f_code.co_filename):
            refuse(_REASONS[func])
        if func in _OF_ARGUMENTS and id(args[0]) in self._given and not is_foreign(_caller().f_code.co_filename):
            raise ValueError(
                f"the forward asks for {_OF_ARGUMENTS[func]} of an argument or a weight; calls are not "
                "told apart by that"
            )
        if func in _ASKS_FOR_GRADIENTS and id(args[0]) in self._given and not is_foreign(_caller().f_code.co_filename):
            wanted = next(iter([*args[1:], *(kwargs or {}).values()]), True)
            if bool(wanted) != args[0].requires_grad:
                refuse("sets requires_grad of an argument or a weight")
        if func is torch.Tensor.register_hook:
            self.hooks += [*args[1:], *(kwargs or {}).values()]
        if func is torch.nn.functional.one_hot:
            return one_hot(*args, **(kwargs or {}))
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


def check_no_attributes(tensors: Sequence[torch.Tensor], which: str) -> None:
    """Refuse what the forward has put on tensors; `which` ends the sentence."""
    for each in tensors:
        for name in each.__dict__.keys() - _OF_TRACED_TENSORS:
            if not name.startswith("_"):
                refuse(f"puts the attribute {name!r} on a tensor that {which}")


@contextlib.contextmanager
def refusing(*, again: bool, given: Sequence[torch.Tensor] = (), anomaly: bool = False) -> Iterator[Refusals]:
    """Refuse all that while a forward is traced by this thread.

    `again`: this is not its first trace. `given` are the tensors it is called with. `anomaly`: whether the user, and
    not the trace, looks for anomalies.
    """
    refusals = Refusals(given)
    with contextlib.ExitStack() as stack:
        for home, name, deed, by_libraries in (*_FUNCTIONS, *_OF_FILES):
            refused = _refused(getattr(home, name), deed, by_libraries=by_libraries)
            stack.enter_context(_replaced(home, name, refused))
        if again:  # libraries say some things once
            stack.enter_context(_replaced(logging.Logger, "handle", _refused_to_log(logging.Logger.handle)))
        stack.enter_context(_replaced(torch, "is_anomaly_enabled", lambda: anomaly))
        if not again:
            said = _label_said(torch.autograd.profiler.record_function.__enter__)
            stack.enter_context(_replaced(torch.autograd.profiler.record_function, "__enter__", said))
        stack.enter_context(_replaced(FunctionCtx, "set_materialize_grads", refusals.noting_none()))
        stack.enter_context(refusals)
        yield refusals


_OF_TRACED_TENSORS = {"elem"}
_SEEDS = "seeds torch's generator"
_SETS_STATE = "sets the state of torch's generator (fork_rng, set_rng_state)"
_FUNCTIONS: tuple[tuple[Any, str, str, bool], ...] = (  # also by libraries
    (builtins, "print", "prints", False),
    (builtins, "open", "opens a file", False),
    (torch, "manual_seed", _SEEDS, True),
    (torch, "seed", _SEEDS, True),
    (torch.random, "manual_seed", _SEEDS, True),
    (torch.random, "seed", _SEEDS, True),
    (torch, "set_rng_state", _SETS_STATE, True),
    (torch.random, "set_rng_state", _SETS_STATE, True),
)
_OF_PATHS = ("exists", "isfile", "isdir", "getsize", "getmtime")
_OF_PATH_OBJECTS = ("exists", "is_file", "is_dir", "stat", "open", "iterdir", "read_text", "read_bytes", "write_text")
_OF_FILES: tuple[tuple[Any, str, str, bool], ...] = (
    *((os.path, name, "looks at files", False) for name in _OF_PATHS),
    *((pathlib.Path, name, "looks at files", False) for name in _OF_PATH_OBJECTS),
)


@contextlib.contextmanager
def _replaced(home: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """Put another function in the place of one for a while."""
    function = getattr(home, name)
    setattr(home, name, other)
    try:
        yield
    finally:
        setattr(home, name, function)


def _refused(function: Any, deed: str, *, by_libraries: bool) -> Any:
    """Refuse a function; other threads, and libraries where it is said, call it as always."""
    thread = threading.get_ident()

    def refused(*args: Any, **kwargs: Any) -> Any:
        is_counted = by_libraries or not is_foreign(sys._getframe(1).f_code.co_filename)
        if threading.get_ident() == thread and is_counted:
            refuse(deed)
        return function(*args, **kwargs)

    return refused


def _label_said(enter: Any) -> Any:
    """Say that a label of the user's code for profiles is not set by captured calls."""
    thread = threading.get_ident()

    def said(label: Any) -> Any:
        if threading.get_ident() == thread and not is_foreign(sys._getframe(1).f_code.co_filename):
            warnings.warn(
                f"the forward sets the label {label.name!r} for profiles (record_function), which captured calls do "
                "not; profile a model that is not fitted to see it",
                stacklevel=2,
            )
        return enter(label)

    return said


def _refused_to_log(handle: Any) -> Any:
    """Refuse lines that the user's code, or a library around torch, logs."""
    thread = threading.get_ident()

    def refused(logger: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() == thread and not is_foreign(record.pathname):
            refuse(f"logs a line ({short_line(record.pathname, record.lineno)})")
        handle(logger, record)

    return refused
