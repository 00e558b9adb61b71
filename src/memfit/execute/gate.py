"""Let other threads wait while a call of a model is captured.

Note [While a call is captured]
    A trace puts tensors without memory in the place of a model's parameters. Another thread that calls the model
    meanwhile would compute with those. So for that time the model's forward is one that lets other threads wait.
"""

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any


class Gate:
    """Stands for the forward of a model that is captured, see Note [While a call is captured]."""

    def __init__(self, original: Callable[..., Any], later: Callable[..., Any]) -> None:
        """The capturing thread runs `original`, others run `later` when the gate was opened."""
        self._original, self._later = original, later
        self._thread = threading.get_ident()
        self._is_open = threading.Event()
        functools.update_wrapper(self, original)

    def open(self) -> None:
        """Let those that wait go on."""
        self._is_open.set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == self._thread or not _is_pythons(threading.current_thread()):
            return self._original(*args, **kwargs)
        self._is_open.wait()
        return self._later(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> Any:
        return _same, (self._original,)


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _is_pythons(thread: threading.Thread) -> bool:
    """Return whether Python has started a thread; who waits for the engine's may be the one that captures."""
    return not isinstance(thread, threading._DummyThread)
