"""Plain numbers that a loss reads from around it.

Note [Captured losses]
    A captured call computes with the Python numbers it found when it was captured. A loss that reads a number which
    changes from step to step (the weight of a term that is annealed) would go on with the old one, so the numbers that
    can be seen are compared before every step: those in its closure, in the globals it names, and in the attributes of
    the object it is a method of.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from memfit.errors import ExecutionError

_PLAIN = (bool, int, float, str)


def numbers_read_by(loss: Any) -> dict[str, Any]:
    """Names and values, see Note [Captured losses]."""
    return {name: value for name, value in _read_by(loss) if isinstance(value, _PLAIN)}


def check_unchanged(loss: Any, before: dict[str, Any]) -> None:
    """Refuse to run a captured loss that would compute something else by now."""
    now = numbers_read_by(loss)
    if now == before:
        return
    name = next(each for each in {**before, **now} if before.get(each) != now.get(each))
    raise ExecutionError(
        f"the loss reads {name!r}, which was {before.get(name)!r} when it was captured and is {now.get(name)!r} now; "
        "put what changes from step to step into the batch as a tensor, or choose the techniques by hand without a "
        "budget"
    )


def _read_by(loss: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(loss, functools.partial):
        yield from loss.keywords.items()
        yield from ((f"argument {place}", value) for place, value in enumerate(loss.args))
        yield from _read_by(loss.func)
        return
    owner = getattr(loss, "__self__", None if inspect.isroutine(loss) else loss)
    if owner is not None:
        yield from getattr(owner, "__dict__", {}).items()
    function = inspect.unwrap(loss) if inspect.isroutine(loss) else type(loss).__call__
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        read = inspect.getclosurevars(function)
        yield from read.nonlocals.items()
        yield from read.globals.items()
