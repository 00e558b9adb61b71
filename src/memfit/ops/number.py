"""A number among the arguments of operations that every call takes anew, see `capture/numbers.py`."""

import threading
from collections.abc import Callable, Sequence
from typing import Any


class NotFollowed(ValueError):
    """A number is used in a way that a captured call cannot follow."""


REFUSALS: list[str] = []  # of the trace that goes on: the model's code may catch what is raised


def refused(*_: Any) -> Any:
    """Refuse to say what a number is."""
    REFUSALS.append("a number that changes from call to call is compared or converted")
    raise NotFollowed(REFUSALS[-1])


class Number(float):
    """A number in a graph that every call takes anew; what reckons with it while a call is captured is refused."""

    evaluate: Callable[[Sequence[float]], float]
    local: threading.local  # whose `now` it is

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = refused
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refused
    __pow__ = __rpow__ = __neg__ = __abs__ = __bool__ = __int__ = refused
    __hash__ = float.__hash__

    def __repr__(self) -> str:
        return "number"
