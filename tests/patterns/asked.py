"""What a forward is given, and what it asks of its arguments and of torch."""

import enum
import functools
import sys
import threading
from typing import Any

import torch
from torch import nn

from patterns.models import Net
from patterns.pattern import LEFT, Pattern, State, features, fit_with_room, loss_of, step_of


class Mode(enum.Enum):
    SLOW = 1
    FAST = 2


class Taking(Net):
    """A net whose forward asks for a factor."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.factor()

    def factor(self) -> Any:
        return 1.0


class PopsBatch(Net):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(batch.pop("x")) * batch.get("scale", 1.0)


class LooksAtMask(Net):
    """Leaves out the mask where it hides nothing, as transformers does."""

    def forward(self, batch: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(batch))
        if not bool((mask == 1).all()):
            hidden = hidden.masked_fill(mask.unsqueeze(-1) == 0, 0.0)
        return self.second(hidden)


def with_mask(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of(state.model(*masked(number)), batch[0])


def masked(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = features(number)
    return batch, torch.arange(len(batch)) < (20 if number % 3 == 1 else len(batch))


class FillsList(Net):
    def forward(self, batch: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        hidden = torch.tanh(self.first(batch))
        found.append(hidden.square().mean())
        return self.second(hidden)


class FillsBatch(Net):
    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.first(batch["x"]))
        batch["hidden"], batch["scores"] = hidden, self.second(hidden)
        return batch


class SortsScales(Net):
    """Does otherwise where it is given one list twice."""

    def forward(self, batch: torch.Tensor, scales: list[float], others: list[float]) -> torch.Tensor:
        others.append(4.0)
        scales.sort()
        return super().forward(batch) * scales[0] * len(scales) * (2 if others is scales else 3)


class ByMode(Net):
    def forward(self, batch: torch.Tensor, mode: Mode) -> torch.Tensor:
        return super().forward(batch) * (2 if mode is Mode.FAST else 3)


class Attends(Net):
    """Asks whether it attends to itself."""

    def forward(self, batch: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(batch + other) * (2 if other is batch else 3)


class ReturnsShape(Net):
    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
        return super().forward(batch), batch.shape


class ReturnsKept(Net):
    """Keeps the dictionary that it returns."""

    def forward(self, batch: torch.Tensor) -> dict[str, Any]:
        self.last = {"scores": super().forward(batch), "number": 1}
        return self.last


class ReturnsList(Net):
    """Returns the list to which it appends."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def forward(self, batch: torch.Tensor) -> list[torch.Tensor]:
        self.found.append(super().forward(batch))
        return self.found


class AsksThreads(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (torch.get_num_threads())


class AsksPrecision(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (2 if torch.get_float32_matmul_precision() == "high" else 3)


class AsksLibrary(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (2 if torch.backends.cudnn.benchmark else 3)


class AsksAnomaly(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (2 if torch.is_anomaly_enabled() else 3)


class AsksDefault(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (torch.get_default_dtype().itemsize)


class AsksLimit(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (sys.getrecursionlimit() / 1000)


class AsksThread(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (2 if threading.current_thread().name == "MainThread" else 3)


class AsksOffset(Net):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch) * (2 if batch.storage_offset() else 3)


def positions_of(count: int) -> torch.Tensor:
    return torch.linspace(0, 1, count).unsqueeze(1)


cached_positions = functools.lru_cache(positions_of)
POSITIONS: dict[int, torch.Tensor] = {}


class CachesByDefault(Net):
    """Keeps tensors in a default of its forward."""

    def forward(self, batch: torch.Tensor, cache: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
        if len(batch) not in cache:
            cache[len(batch)] = torch.linspace(0, 1, len(batch)).unsqueeze(1)
        return super().forward(batch) + cache[len(batch)]


class CachesInGlobal(Taking):
    def factor(self) -> Any:
        if 32 not in POSITIONS:
            POSITIONS[32] = positions_of(32)
        return POSITIONS[32]


class CachesByFunction(Taking):
    def factor(self) -> Any:
        return cached_positions(32)


def scaled(hidden: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
    return hidden * factor


class HasDefaults(Net):
    def between(self, hidden: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return scaled(torch.sigmoid(hidden)) * factor


class Schedule:
    """A number of a class of models, read through a descriptor."""

    number = 0

    def __get__(self, instance: Any, owner: Any) -> float:
        return 1.0 + Schedule.number


class Meta(type):
    scale = 1.0


class Described(Taking, metaclass=Meta):
    schedule = Schedule()

    def factor(self) -> Any:
        return self.schedule * type(self).scale


class AsksModules(Taking):
    def factor(self) -> Any:
        return 2 if "no_such_kernels" in sys.modules else 3


def other_defaults(state: State, number: int) -> None:
    scaled.__kwdefaults__ = {"factor": 1.0 + number // 10}
    HasDefaults.between.__defaults__ = (1.0 + number // 5,)


def usual_defaults(state: State) -> None:
    scaled.__kwdefaults__, HasDefaults.between.__defaults__ = {"factor": 1.0}, (1.0,)


def other_numbers(state: State, number: int) -> None:
    Schedule.number, Meta.scale = number // 10, 1.0 + number // 5


def import_kernels(state: State, number: int) -> None:
    if number == 10:
        sys.modules["no_such_kernels"] = sys


def forget_all(state: State) -> None:
    CachesByDefault.forward.__defaults__[0].clear()
    POSITIONS.clear()
    cached_positions.cache_clear()


def popped(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    given = {"x": batch, "scale": torch.ones(())}
    loss = loss_of(state.model(given), batch)
    state.left = [*getattr(state, "left", []), *given]
    return loss


def filled(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    found: list[torch.Tensor] = []
    return loss_of(state.model(batch, found), batch) + sum(found)


def filled_itself(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    given = {"x": batch}
    output = state.model(given)
    state.seen = [*getattr(state, "seen", []), output is given, *given]
    return loss_of(given["scores"], batch) + given["hidden"].square().mean()


def sorted_twice(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    scales = [3.0, 1.0, 2.0]
    others = scales if number % 3 == 0 else [1.0]
    loss = loss_of(state.model(batch, scales, others), batch)
    state.seen = [*getattr(state, "seen", []), scales, others]
    return loss


def in_turn(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of(state.model(batch, [Mode.SLOW, Mode.FAST][number % 2]), batch)


def on_itself(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of(state.model(batch, batch if number % 2 else batch.clone()), batch)


def by_shape(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    output, shape = state.model(batch)
    return loss_of(output, batch) / shape.numel()


def added_to(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    output = state.model(batch)
    output["seen"] = number
    state.seen = [*getattr(state, "seen", []), state.model.last["seen"]]
    return loss_of(output["scores"], batch)


def last_of(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of(state.model(batch)[-1], batch)


def anomalies(state: State, number: int) -> None:
    torch.autograd.set_detect_anomaly(number % 4 > 1)


def asking(name: str, make: type[nn.Module], change: Any, end: Any) -> Pattern:
    return Pattern(name=name, make=make, fit=fit_with_room, change=change, end=end)


def fit_with(*more: Any) -> Any:
    return lambda state, batch: fit_with_room(state, (batch, *more))


PATTERNS = [
    Pattern(
        name="a dictionary of the loop's from which the forward pops",
        make=PopsBatch,
        fit=lambda state, batch: fit_with_room(state, ({"x": batch, "scale": torch.ones(())},)),
        step=step_of(popped),
        beside=lambda state: state.left,
    ),
    Pattern(
        name="a list of the loop's to which the forward appends",
        make=FillsList,
        fit=fit_with([]),
        step=step_of(filled),
    ),
    Pattern(
        name="a dictionary of the loop's that the forward fills and returns",
        make=FillsBatch,
        fit=lambda state, batch: fit_with_room(state, ({"x": batch},)),
        step=step_of(filled_itself),
        beside=lambda state: state.seen,
    ),
    Pattern(
        name="one list given twice, sorted by the forward",
        make=SortsScales,
        fit=lambda state, batch: fit_with_room(state, (batch, [3.0, 1.0, 2.0], [1.0])),
        step=step_of(sorted_twice),
        beside=lambda state: state.seen,
    ),
    Pattern(
        name="an enum as an argument, compared by `is`", make=ByMode, fit=fit_with(Mode.SLOW), step=step_of(in_turn)
    ),
    Pattern(
        name="two arguments that are one tensor, asked by `is`",
        make=Attends,
        fit=lambda state, batch: fit_with_room(state, (batch, features(99))),
        step=step_of(on_itself),
    ),
    Pattern(name="a shape returned", make=ReturnsShape, step=step_of(by_shape)),
    Pattern(
        name="a dictionary that is returned and kept on self",
        make=ReturnsKept,
        fit=fit_with_room,
        step=step_of(added_to),
        beside=lambda state: state.seen,
    ),
    Pattern(
        name="a list on self that is appended to and returned",
        make=ReturnsList,
        step=step_of(last_of),
        change=lambda state, number: state.model.found.clear(),
    ),
    Pattern(
        name="tensors kept in a default of the forward",
        make=CachesByDefault,
        beside=lambda state: dict(CachesByDefault.forward.__defaults__[0]),
        end=forget_all,
    ),
    Pattern(name="tensors kept in a global", make=CachesInGlobal, beside=lambda state: dict(POSITIONS), end=forget_all),
    Pattern(name="tensors kept by functools.lru_cache", make=CachesByFunction, end=forget_all),
    asking("defaults of a function and of a method changed", HasDefaults, other_defaults, usual_defaults),
    asking(
        "numbers of a descriptor and of a metaclass changed",
        Described,
        other_numbers,
        lambda state: other_numbers(state, 0),
    ),
    asking(
        "a module imported for which the forward looks",
        AsksModules,
        import_kernels,
        lambda state: sys.modules.pop("no_such_kernels", None),
    ),
    asking(
        "the number of threads asked by the forward, changed",
        AsksThreads,
        lambda state, number: torch.set_num_threads(1 + number % 2),
        lambda state: torch.set_num_threads(1),
    ),
    asking(
        "the precision of products asked by the forward, changed",
        AsksPrecision,
        lambda state, number: torch.set_float32_matmul_precision(["highest", "high"][number % 2]),
        lambda state: torch.set_float32_matmul_precision("highest"),
    ),
    asking(
        "torch.backends.cudnn.benchmark asked by the forward, changed",
        AsksLibrary,
        lambda state, number: setattr(torch.backends.cudnn, "benchmark", number % 2 == 1),
        lambda state: setattr(torch.backends.cudnn, "benchmark", False),
    ),
    asking(
        "torch.is_anomaly_enabled() asked by the forward, changed",
        AsksAnomaly,
        anomalies,
        lambda state: torch.autograd.set_detect_anomaly(False),
    ),
    asking(
        "torch.get_default_dtype() asked by the forward, changed",
        AsksDefault,
        lambda state, number: torch.set_default_dtype([torch.float32, torch.float64][number % 2]),
        lambda state: torch.set_default_dtype(torch.float32),
    ),
    Pattern(
        name="a mask of which the forward asks whether all of it is one, some batches padded",
        make=LooksAtMask,
        batch=masked,
        fit=fit_with_room,
        step=step_of(with_mask),
    ),
    Pattern(
        name="sys.getrecursionlimit() asked by the forward",
        make=AsksLimit,
        outcome=LEFT + "calls sys.getrecursionlimit",
    ),
    Pattern(
        name="the name of the thread asked by the forward",
        make=AsksThread,
        outcome=LEFT + "calls threading.current_thread",
    ),
    Pattern(
        name="storage_offset() of the batch asked by the forward",
        make=AsksOffset,
        outcome=LEFT + "asks for storage_offset() of an argument",
    ),
]
