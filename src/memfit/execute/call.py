"""Run one kind of call of a module."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from memfit.capture.guards import Guards
from memfit.capture.questions import Questions


class Call(Protocol):
    """One kind of call, ready to run on parameters and buffers (`states`) and arguments."""

    guards: Guards  # what the model's code has read, see `capture/guards.py`
    questions: Questions  # that it asks about its arguments, see `capture/questions.py`

    def look_again(self) -> None:
        """Expect other parameters, with other hooks, at the next call."""

    def __call__(self, states: Sequence[torch.Tensor], args: Any, kwargs: Any, /) -> Any: ...


class OwnForward:
    """A call that memfit does not change."""

    guards = Guards([], [])
    questions = Questions()

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def look_again(self) -> None:
        """Do nothing."""

    def __call__(self, _states: Any, args: Any, kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)
