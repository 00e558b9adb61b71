"""Let a captured call take numbers anew that change from call to call: the weight of a loss, a temperature.

Note [Followed numbers]
    A trace has the numbers in it that the forward found. One that has changed before is followed when a call is
    captured again: in its place stands an object that can be reckoned with, and given to additions and products of
    tensors, but neither compared nor turned into a number. So no branch, shape or other number can depend on it
    without being seen; where the forward does more with it, the call is captured as it is. Where an operation is given
    it, a number that occurs nowhere else is put into the trace. There, the captured call looks up what it is to be.
    Backward passes take the numbers that their own forward pass had.
"""

import contextlib
import contextvars
import dataclasses
import operator
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from memfit.capture.guards import Place
from memfit.ops.number import REFUSALS, NotFollowed, Number, refused

_MAGIC = 0.7236067977499790  # and numbers near it: no model has them by chance
_NAMES = ("add", "sub", "mul", "div", "true_divide", "multiply", "subtract")
_SPECIAL = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__")
_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__")
_FOLLOWING: contextvars.ContextVar[tuple[Place, ...]] = contextvars.ContextVar("memfit_followed", default=())


def _followed_functions() -> set[Any]:
    methods = [*_NAMES, *(f"{name}_" for name in _NAMES), *_SPECIAL, *_IN_PLACE]
    found = [getattr(torch.Tensor, name, None) for name in methods]
    return {each for each in (*found, *(getattr(torch, name, None) for name in _NAMES)) if each is not None}


_FUNCTIONS = _followed_functions()


@contextlib.contextmanager
def following(places: Sequence[Place]) -> Iterator[None]:
    """Follow numbers in what is captured meanwhile."""
    token = _FOLLOWING.set(tuple(places))
    try:
        yield
    finally:
        _FOLLOWING.reset(token)


def is_following() -> bool:
    """Return whether numbers are followed in what is captured now."""
    return bool(_FOLLOWING.get())


class Follower:
    """Stands for a number, and for what is reckoned from it."""

    def __init__(self, evaluate: Callable[[Sequence[float]], float]) -> None:
        self.evaluate = evaluate  # from the numbers at the followed places

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # who asks for its class must not go another way
        return float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refused()

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = refused
    __bool__ = __float__ = __int__ = __index__ = __hash__ = __round__ = refused
    __str__ = __repr__ = __format__ = __getattr__ = __array__ = refused
    __array_ufunc__ = None  # numbers of NumPy's leave it to `_reckoned`

    def __neg__(self) -> "Follower":
        return Follower(lambda numbers: -self.evaluate(numbers))


def _reckoned(function: Callable[[Any, Any], float], *, swapped: bool) -> Callable[[Follower, Any], Any]:
    def reckon(one: Follower, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        if type(other) not in (int, float, Follower):
            refused()
        first, second = (other, one) if swapped else (one, other)
        return Follower(lambda numbers: function(_value(first, numbers), _value(second, numbers)))

    return reckon


for _name in ("add", "sub", "mul", "truediv"):
    setattr(Follower, f"__{_name}__", _reckoned(getattr(operator, _name), swapped=False))
    setattr(Follower, f"__r{_name}__", _reckoned(getattr(operator, _name), swapped=True))


def _power(one: Follower, exponent: Any) -> Follower:
    if type(exponent) is not int:  # of a negative number that may be complex
        refused()
    return Follower(lambda numbers: one.evaluate(numbers) ** exponent)


setattr(Follower, "__pow__", _power)  # noqa: B010


def _value(each: Any, numbers: Sequence[float]) -> float:
    value: float = each.evaluate(numbers) if type(each) is Follower else each
    return value


@dataclasses.dataclass
class Numbers:
    """The numbers that a captured call takes anew, see Note [Followed numbers]."""

    places: tuple[Place, ...] = dataclasses.field(default_factory=_FOLLOWING.get)
    found: list[Number] = dataclasses.field(default_factory=list)
    _given: dict[float, Follower] = dataclasses.field(default_factory=dict)  # by the number in the trace

    def __post_init__(self) -> None:
        self._values = [each.home[each.name] for each in self.places]

    def begin(self) -> None:
        """Put followers in the places of the numbers, for a forward that is traced from its beginning."""
        self._given.clear()
        REFUSALS.clear()
        self.follow()

    def follow(self) -> None:
        """Put followers in the places of the numbers, for the rest of a trace."""
        for index, place in enumerate(self.places):
            place.home[place.name] = Follower(operator.itemgetter(index))  # type: ignore[index]

    def restore(self) -> None:
        """Put the numbers themselves there."""
        for place, value in zip(self.places, self._values, strict=True):
            place.home[place.name] = value  # type: ignore[index]

    def attributes(self, home: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of attributes as they are without followers."""
        own = {each.name: value for each, value in zip(self.places, self._values, strict=True) if each.home is home}
        return {**home, **own}

    def giving(self) -> contextlib.AbstractContextManager[object]:
        """Give operations numbers in the place of followers meanwhile."""
        return _Giving(self._number_for) if self.places else contextlib.nullcontext()

    def _number_for(self, follower: Follower) -> float:
        number = _MAGIC * (1 + len(self._given) * 1e-9)
        self._given[number] = follower
        return number

    def mark(self, graph: fx.Graph) -> None:
        """Put numbers that calls take anew into a traced graph."""
        if self.places and REFUSALS:
            raise NotFollowed(REFUSALS[0])
        missing = {*self._given}
        for node in graph.nodes if missing else ():
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), self._marked(missing))
        if missing:
            raise NotFollowed("a number that changes from call to call is not found in the trace")

    def _marked(self, missing: set[float]) -> Callable[[Any], Any]:
        def marked(value: Any) -> Any:
            if type(value) is not float or value not in self._given:
                return value
            missing.discard(value)
            number = Number(value)
            number.evaluate, number.local = self._given[value].evaluate, threading.local()
            self.found.append(number)
            return number

        return marked

    def taken(self) -> list[float]:
        """Return what the numbers are now."""
        values = [each.home[each.name] for each in self.places]
        return [each.evaluate(values) for each in self.found]

    def changed_since(self, values: Sequence[float], names: Collection[str]) -> str:
        """Return the path of a number of one of these names if what is made of numbers is not `values` any more."""
        places = [each for each in self.places if each.name in names]
        return places[0].path if places and self.taken() != values else ""

    def put(self, values: Sequence[float]) -> None:
        """Let what runs next on this thread find these numbers."""
        for number, value in zip(self.found, values, strict=True):
            number.local.now = value


class _Giving(TorchFunctionMode):
    """Gives operations numbers in the place of followers."""

    def __init__(self, number_for: Callable[[Follower], float]) -> None:
        super().__init__()
        self._number_for = number_for

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(type(each) is Follower for each in (*args, *kwargs.values())):
            if func not in _FUNCTIONS or "alpha" in kwargs:
                raise NotFollowed(f"a number that changes from call to call is given to {func.__name__}")
            args = [self._number_for(each) if type(each) is Follower else each for each in args]
            kwargs = {name: self._number_for(each) if type(each) is Follower else each for name, each in kwargs.items()}
        return func(*args, **kwargs)
