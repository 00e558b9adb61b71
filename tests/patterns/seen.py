"""What a forward sees and tells beside its arguments: logs, files, callers, classes."""

import datetime
import functools
import inspect
import logging
import os.path
import pathlib
import time
from typing import Any

import torch
from torch import nn

from patterns.changed import assign
from patterns.models import Net, Normed
from patterns.pattern import LEFT, Pattern, State, loss_of, step_of

SCALE = 1.0
FLAG = pathlib.Path(__file__).with_name("no-such-file")
log = logging.getLogger("patterns.seen")
log.setLevel(logging.INFO)


class Listens(logging.Handler):
    """Keeps the lines that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Logs(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        log.info("%d rows", hidden.shape[0])
        return torch.sigmoid(hidden)


class LogsInVain(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        log.debug("%d rows", hidden.shape[0])
        return torch.sigmoid(hidden)


class LooksForFile(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(hidden) if os.path.exists(FLAG) else torch.sigmoid(hidden)


class LooksForPath(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(hidden) if FLAG.exists() else torch.sigmoid(hidden)


class ReadsGlobals(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * globals()["SCALE"]


class LooksAtCallers(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (1.0 if inspect.stack() else 2.0)


class LooksAtCalendar(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (1.0 if datetime.datetime.now().year else 2.0)


def seconds() -> float:
    return time.monotonic()


class LooksAtClock(Net):
    """Asks a helper that runs no operator."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (1.0 if seconds() else 2.0)


class Soft:
    def act(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden)


class Hard(Soft):
    def act(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(hidden)


class HoldsActivation(Net):
    def __init__(self) -> None:
        super().__init__()
        self.activation = Soft()

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.activation.act(hidden)


class Scaled(Net):
    """Has a number on its class."""

    scale = 1.0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.scale


class ScaledToo(Scaled):
    """Takes the number of its base."""


class Doubled(nn.LayerNorm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


class MarksOutput(Net):
    def forward(self, batch: torch.Tensor) -> Any:
        output: Any = super().forward(batch)
        output.mean_of_batch = batch.mean()
        return output


def listen(state: State) -> None:
    state.listens = Listens()
    log.addHandler(state.listens)


def stop_listening(_state: State) -> None:
    log.handlers.clear()


def with_the_mark(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    output = state.model(batch)
    return loss_of(output, batch) + output.mean_of_batch


def overshadow(state: State, number: int) -> None:
    if number == 10:
        ScaledToo.scale = 3.0


def uncover(_state: State) -> None:
    if "scale" in vars(ScaledToo):
        del ScaledToo.scale


def come_and_go(state: State, number: int) -> None:
    if number == 5:
        state.model.scale = 2.0
    if number == 12:
        del state.model.scale


def own_method(state: State, number: int) -> None:
    if number == 10:
        state.model.between = functools.partial(torch.mul, 0.5)


PATTERNS = [
    Pattern(
        name="a line logged by every forward",
        make=Logs,
        start=listen,
        beside=lambda state: state.listens.lines,
        end=stop_listening,
        outcome=LEFT + "logs a line",
    ),
    Pattern(name="lines logged below the level", make=LogsInVain),
    Pattern(name="os.path.exists in the forward", make=LooksForFile, outcome=LEFT + "looks at files"),
    Pattern(name="Path.exists in the forward", make=LooksForPath, outcome=LEFT + "looks at files"),
    Pattern(name="globals() in the forward", make=ReadsGlobals, outcome=LEFT + "calls globals"),
    Pattern(name="inspect.stack() in the forward", make=LooksAtCallers, outcome=LEFT + "calls inspect.stack"),
    Pattern(name="datetime.now() in the forward", make=LooksAtCalendar, outcome=LEFT + "calls datetime.datetime.now"),
    Pattern(name="a clock in a helper of the forward", make=LooksAtClock, outcome=LEFT + "calls time.monotonic"),
    Pattern(
        name="the class of an object on self assigned",
        make=HoldsActivation,
        change=assign("activation.__class__", lambda n: Hard if n > 9 else Soft),
    ),
    Pattern(
        name="the class of a layer assigned",
        make=Normed,
        change=assign("ln.__class__", lambda n: Doubled if n > 9 else nn.LayerNorm),
    ),
    Pattern(
        name="a number of the class set on the instance", make=Scaled, change=assign("scale", lambda n: 1 + n // 5)
    ),
    Pattern(name="a number of the class set on the instance, then deleted", make=Scaled, change=come_and_go),
    Pattern(name="a number of a base class set on the class", make=ScaledToo, change=overshadow, end=uncover),
    Pattern(name="a method put on the instance", make=Scaled, change=own_method),
    Pattern(
        name="an attribute put on the output",
        make=MarksOutput,
        step=step_of(with_the_mark),
        outcome=LEFT + "puts the attribute 'mean_of_batch' on a tensor that it returns",
    ),
]
