"""Change between two steps what people change, on the model and around it."""

import argparse
import dataclasses
import functools
import types
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn

from patterns.models import Blocks, Net, Normed
from patterns.pattern import STEPS, Pattern, State, fit_with_room

SCALE = 1.0
SETTINGS = {"scale": 1.0}
TREE = types.SimpleNamespace(loss=types.SimpleNamespace(scale=1.0))


def activation(hidden: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(hidden)


class ByAttribute(Net):
    """Reads an attribute, whatever it is."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class Annealed(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) + self.beta * hidden.square()


class Tempered(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.softmax(hidden / self.temperature, dim=-1)


class ByGlobal(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * SCALE


class ByGlobalDict(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * SETTINGS["scale"]


class ByGlobalTree(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * TREE.loss.scale


class ByGlobalFunction(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return activation(hidden)


class ByClass(Net):
    scale = 1.0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * ByClass.scale


class ByOwnClass(Net):
    scale = 1.0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.scale


class ByConfig(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.config.scale


class ByReference(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.trainer().scale


class ByDict(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        for name, factor in self.factors.items():
            hidden = torch.sin(hidden) * factor if name == "sin" else torch.cos(hidden) * factor
        return hidden


class ByList(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.factors[0] + float(self.factors[1])


class ByFunction(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.function(hidden)


class ByInstanceDict(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * vars(self)["scale"]


class ByMethod(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.shaped(hidden)

    def shaped(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden)


@dataclasses.dataclass
class Config:
    scale: float = 1.0


@dataclasses.dataclass(slots=True)
class SlottedConfig:
    scale: float = 1.0


def closed_over() -> ByFunction:
    factor = 1.0

    def scaled(hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * factor

    def set_factor(value: float) -> None:
        nonlocal factor
        factor = value

    model = ByFunction(function=scaled)
    model.set_factor = set_factor
    return model


def referring() -> ByReference:
    trainer = Config()
    model = ByReference(trainer=weakref.ref(trainer))
    model.first.owner = trainer  # keeps it
    return model


def level(number: int) -> float:
    """Another number every five steps."""
    return 1.0 + number // 5 / 4


def set_global(value: float) -> None:
    global SCALE
    SCALE = value


def set_function(function: Any) -> None:
    global activation
    activation = function


def replace_head(state: State, number: int) -> None:
    if number == 10:
        state.model.second = nn.Linear(32, 4)
        state.optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.01)


def replace_function(state: State, number: int) -> None:
    state.model.function = torch.sigmoid if number < 10 else torch.tanh


def swap_names(state: State, number: int) -> None:
    if number == 10:
        state.model.factors.clear()
        state.model.factors.update({"cos": 0.5, "sin": 2.0})


def replace_method(state: State, number: int) -> None:
    if number == 10:
        state.model.second.forward = lambda hidden: torch.tanh(nn.Linear.forward(state.model.second, hidden))


def replace_class_method(state: State, number: int) -> None:
    ByMethod.shaped = (lambda model, hidden: torch.tanh(hidden)) if number >= 10 else ORIGINAL_SHAPED


ORIGINAL_SHAPED = ByMethod.shaped
ORIGINAL_ACTIVATION = activation


def grow(state: State, number: int) -> None:
    if number == 10:
        torch.manual_seed(5)
        state.model.blocks.append(nn.Linear(16, 16))
        state.optimizer.add_param_group({"params": list(state.model.blocks[-1].parameters())})


def assign(path: str, value: Any = level) -> Any:
    """Set an attribute of the model before every step."""
    names = path.split(".")

    def change(state: State, number: int) -> None:
        setattr(functools.reduce(getattr, names[:-1], state.model), names[-1], value(number))

    return change


PATTERNS = [
    Pattern(
        name="the weight of a term annealed on self every step (KL annealing)",
        make=lambda: Annealed(beta=0.0),
        change=assign("beta", lambda number: number / STEPS),
        slow=True,
    ),
    Pattern(
        name="a temperature on self, changed every five steps",
        make=lambda: Tempered(temperature=1.0),
        change=assign("temperature"),
    ),
    Pattern(name="the rate of a dropout layer changed", make=Normed, change=assign("dropout.p", lambda n: n // 5 / 10)),
    Pattern(
        name="the momentum of batch norm changed", make=Normed, change=assign("bn.momentum", lambda n: level(n) / 10)
    ),
    Pattern(
        name="the eps of batch norm changed",
        make=Normed,
        change=assign("bn.eps", lambda n: level(n) / 100),
        slow=True,
    ),
    Pattern(
        name="the eps of layer norm changed",
        make=Normed,
        change=assign("ln.eps", lambda n: level(n) / 100),
        slow=True,
    ),
    Pattern(
        name="a global number changed",
        make=ByGlobal,
        change=lambda state, number: set_global(level(number)),
        end=lambda state: set_global(1.0),
    ),
    Pattern(
        name="a number in a global dict changed",
        make=ByGlobalDict,
        change=lambda state, number: SETTINGS.update(scale=level(number)),
        end=lambda state: SETTINGS.update(scale=1.0),
    ),
    Pattern(
        name="a number deep in a global object changed",
        make=ByGlobalTree,
        change=lambda state, number: setattr(TREE.loss, "scale", level(number)),
        end=lambda state: setattr(TREE.loss, "scale", 1.0),
    ),
    Pattern(
        name="a global function replaced by another",
        make=ByGlobalFunction,
        change=lambda state, number: set_function(torch.relu if number >= 10 else ORIGINAL_ACTIVATION),
        end=lambda state: set_function(ORIGINAL_ACTIVATION),
    ),
    Pattern(
        name="a number on the class, read through the class, changed",
        make=ByClass,
        change=lambda state, number: setattr(ByClass, "scale", level(number)),
        end=lambda state: setattr(ByClass, "scale", 1.0),
    ),
    Pattern(
        name="a number on the class, read through self, changed",
        make=ByOwnClass,
        change=lambda state, number: setattr(ByOwnClass, "scale", level(number)),
        end=lambda state: setattr(ByOwnClass, "scale", 1.0),
    ),
    Pattern(
        name="a variable of a closure changed",
        make=closed_over,
        change=lambda state, number: state.model.set_factor(level(number)),
        slow=True,
    ),
    Pattern(
        name="an attribute of a dataclass held by the module changed",
        make=lambda: ByConfig(config=Config()),
        change=assign("config.scale"),
    ),
    Pattern(
        name="an attribute of a dataclass with slots changed",
        make=lambda: ByConfig(config=SlottedConfig()),
        change=assign("config.scale"),
    ),
    Pattern(
        name="an attribute of a SimpleNamespace changed",
        make=lambda: ByConfig(config=types.SimpleNamespace(scale=1.0)),
        change=assign("config.scale"),
    ),
    Pattern(
        name="an attribute of argparse's arguments changed",
        make=lambda: ByConfig(config=argparse.Namespace(scale=1.0)),
        change=assign("config.scale"),
    ),
    Pattern(
        name="a whole config replaced",
        make=lambda: ByConfig(config=Config()),
        change=assign("config", lambda n: Config(level(n))),
        slow=True,
    ),
    Pattern(
        name="an attribute behind a weak reference changed",
        make=referring,
        change=lambda state, number: setattr(state.model.trainer(), "scale", level(number)),
    ),
    Pattern(
        name="an element of a list on self changed",
        make=lambda: ByList(factors=[1.0, 0.0]),
        change=lambda state, number: state.model.factors.__setitem__(0, level(number)),
    ),
    Pattern(
        name="an element of a NumPy array on self changed",
        make=lambda: ByList(factors=np.ones(2)),
        change=lambda state, number: state.model.factors.__setitem__(1, level(number)),
    ),
    Pattern(
        name="a value of a dict on self changed",
        make=lambda: ByDict(factors={"sin": 0.5, "cos": 2.0}),
        change=lambda state, number: state.model.factors.update(sin=level(number)),
    ),
    Pattern(
        name="the keys of a dict on self changed, its values not",
        make=lambda: ByDict(factors={"sin": 0.5, "cos": 2.0}),
        change=swap_names,
    ),
    Pattern(
        name="a number on self read through vars(self), changed",
        make=lambda: ByInstanceDict(scale=1.0),
        change=assign("scale"),
    ),
    Pattern(
        name="an activation function on self replaced",
        make=lambda: ByFunction(function=torch.sigmoid),
        change=replace_function,
    ),
    Pattern(
        name="an activation with a number of its own (functools.partial) replaced",
        make=lambda: ByFunction(function=functools.partial(torch.mul, other=1.0)),
        change=assign("function", lambda n: functools.partial(torch.mul, other=level(n))),
        slow=True,
    ),
    Pattern(name="a submodule replaced (head swapped)", make=Net, change=replace_head),
    Pattern(name="a block appended to a ModuleList", make=Blocks, change=grow, fit=fit_with_room),
    Pattern(
        name="the forward of a submodule replaced on the instance",
        make=Net,
        change=replace_method,
    ),
    Pattern(
        name="a method of the class replaced",
        make=ByMethod,
        change=replace_class_method,
        end=lambda state: setattr(ByMethod, "shaped", ORIGINAL_SHAPED),
    ),
]
