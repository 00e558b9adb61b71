"""Numbers that are changed deep inside what a model holds, or where only its class holds them."""

import dataclasses
import functools
from collections import deque
from typing import Any

import torch

from patterns.changed import ByAttribute, Config, level
from patterns.models import Net
from patterns.pattern import Pattern, State


class ByClassDict(Net):
    factors = {"scale": 1.0}  # noqa: RUF012 - as people write it

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.factors["scale"]


class ByTypeOfSelf(Net):
    scale = 1.0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * type(self).scale


class ByClassMethod(Net):
    scale = 1.0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.scaled(torch.sigmoid(hidden))

    @classmethod
    def scaled(cls, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * cls.scale


class ByNestedConfig(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.config.loss.scale


class ByConfigs(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.configs[0]["loss"].scale


class ByPair(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        name, numbers = self.pair
        return getattr(torch, name)(hidden) * numbers[0]


class ByWindow(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (sum(self.window) / len(self.window))


class ByProperty(ByAttribute):
    @property
    def scale(self) -> float:
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = value

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.scale


class Fields:
    """Answers for attributes out of a dict, as configuration libraries do."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__["_fields"] = fields

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_fields"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_fields"][name] = value


class ByFields(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.config.scale


class ByCached(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * cached_scale()


SOURCE = Config()


@functools.cache
def cached_scale() -> float:
    return SOURCE.scale


def set_cached(value: float) -> None:
    SOURCE.scale = value
    cached_scale.cache_clear()


def scaled(hidden: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(hidden) * scaled.factor


scaled.factor = 1.0


class ByFunctionAttribute(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return scaled(hidden)


@dataclasses.dataclass
class Nested:
    loss: Config = dataclasses.field(default_factory=Config)


class Multiplied(torch.autograd.Function):
    """Reverses and scales gradients by a number that it is given."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.factor * gradient, None


class ReversesByAttribute(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return Multiplied.apply(torch.sigmoid(hidden), self.factor)


def on_class(name: str, cls: Any, **fields: Any) -> Pattern:
    return Pattern(
        name=name,
        make=cls,
        change=lambda state, number: setattr(cls, "scale", level(number)),
        end=lambda state: setattr(cls, "scale", 1.0),
        **fields,
    )


def slide(state: State, number: int) -> None:
    state.model.window.append(level(number))


class Schedule:
    """What people write to anneal a number."""

    def __init__(self) -> None:
        self.now = 0.5

    def value(self) -> float:
        return self.now


class ByMethod(Net):
    """Asks a bound method that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = [Schedule()]
        self.weight_of = self.schedule[0].value

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.weight_of()


class ByFunction(Net):
    """Asks a function with a closure that it was given."""

    def __init__(self) -> None:
        super().__init__()
        box = [0.5]
        self.box, self.weight_of = box, lambda: box[0]

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.weight_of()


class ByOther(Net):
    """Reads a number of a module that is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.others = (Net(),)
        self.others[0].gain = 1.0  # type: ignore[assignment]

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.others[0].gain


class ByOptimizer(Net):
    """Reads the learning rate of an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizers = [torch.optim.SGD(self.parameters(), lr=0.5)]

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.optimizers[0].param_groups[0]["lr"]


class AsksWhetherThereIs(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (2.0 if hasattr(self, "extra") else 1.0)


class AsksForTheType(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (self.scale if type(self.scale) is float else 3.0)


def anneal_then_stop(state: State, number: int) -> None:
    state.model.scale = level(number) if number < 15 else None


class UntilNone(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(hidden)
        return hidden if self.scale is None else hidden * self.scale


PATTERNS = [
    Pattern(
        name="a schedule asked by a bound method on self",
        make=ByMethod,
        change=lambda state, number: setattr(state.model.schedule[0], "now", level(number)),
    ),
    Pattern(
        name="a function with a closure on self, its variable changed",
        make=ByFunction,
        change=lambda state, number: state.model.box.__setitem__(0, level(number)),
    ),
    Pattern(
        name="a number on a module that is no part, changed",
        make=ByOther,
        change=lambda state, number: setattr(state.model.others[0], "gain", level(number)),
    ),
    Pattern(
        name="the learning rate of an optimizer read by the forward, changed",
        make=ByOptimizer,
        change=lambda state, number: state.model.optimizers[0].param_groups[0].update(lr=level(number)),
    ),
    Pattern(
        name="an attribute that comes to be there",
        make=AsksWhetherThereIs,
        change=lambda state, number: setattr(state.model, "extra", 1) if number == 7 else None,
    ),
    Pattern(
        name="a number whose type is asked for, changed every step",
        make=lambda: AsksForTheType(scale=1.0),
        change=lambda state, number: setattr(state.model, "scale", level(number) + number / 100),
    ),
    Pattern(
        name="a number annealed every step, then None",
        make=lambda: UntilNone(scale=1.0),
        change=anneal_then_stop,
    ),
    Pattern(
        name="a dict on the class, read through self, changed",
        make=ByClassDict,
        change=lambda state, number: ByClassDict.factors.update(scale=level(number)),
        end=lambda state: ByClassDict.factors.update(scale=1.0),
    ),
    on_class(
        "a number on the class, read through type(self), changed",
        ByTypeOfSelf,
    ),
    on_class(
        "a number on the class, read by a classmethod, changed",
        ByClassMethod,
    ),
    Pattern(
        name="a dataclass in a dataclass changed",
        make=lambda: ByNestedConfig(config=Nested()),
        change=lambda state, number: setattr(state.model.config.loss, "scale", level(number)),
    ),
    Pattern(
        name="an object in a dict in a list on self changed",
        make=lambda: ByConfigs(configs=[{"loss": Config()}]),
        change=lambda state, number: setattr(state.model.configs[0]["loss"], "scale", level(number)),
    ),
    Pattern(
        name="a list in a tuple on self changed",
        make=lambda: ByPair(pair=("sigmoid", [1.0])),
        change=lambda state, number: state.model.pair[1].__setitem__(0, level(number)),
    ),
    Pattern(
        name="a sliding window (deque) on self",
        make=lambda: ByWindow(window=deque([1.0, 1.0], maxlen=2)),
        change=slide,
    ),
    Pattern(
        name="a property set on self",
        make=lambda: ByProperty(scale=1.0),
        change=lambda state, number: setattr(state.model, "scale", level(number)),
    ),
    Pattern(
        name="a config that answers by __getattr__ changed",
        make=lambda: ByFields(config=Fields(scale=1.0)),
        change=lambda state, number: setattr(state.model.config, "scale", level(number)),
    ),
    Pattern(
        name="a cached function (functools.cache) that answers otherwise",
        make=ByCached,
        change=lambda state, number: set_cached(level(number)),
        end=lambda state: set_cached(1.0),
    ),
    Pattern(
        name="an attribute of a global function changed",
        make=ByFunctionAttribute,
        change=lambda state, number: setattr(scaled, "factor", level(number)),
        end=lambda state: setattr(scaled, "factor", 1.0),
    ),
    Pattern(
        name="gradients reversed by a number on self, changed",
        make=lambda: ReversesByAttribute(factor=1.0),
        change=lambda state, number: setattr(state.model, "factor", level(number)),
    ),
]
