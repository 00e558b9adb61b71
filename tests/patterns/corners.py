"""Corners: what a captured call could get wrong and a plain one cannot."""

import contextlib
import copy
import io
import itertools
import multiprocessing
import time
from collections import UserDict
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from patterns.changed import ByAttribute, ByConfig, ByFunction, Config, level
from patterns.loops import accumulating_step
from patterns.models import Net, Normed
from patterns.pattern import LEFT, Pattern, State, fit, fit_with_room, loss_of, step_of, usual_step


class Schedule:
    """An object that answers by a method."""

    def __init__(self) -> None:
        self.scale = 1.0

    def value(self) -> float:
        return self.scale


SCHEDULE = Schedule()
NUMBERS = itertools.count()


class BySchedule(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * SCHEDULE.value()


class BySharedValue(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.shared.value


class ByUserDict(ByAttribute):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * self.settings["scale"]


class Prints(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        print("between", tuple(hidden.shape))
        return torch.sigmoid(hidden)


class KeepsTime(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.called_at = time.perf_counter_ns()
        return torch.sigmoid(hidden)


class NumbersItsCalls(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.number = next(NUMBERS)
        return torch.sigmoid(hidden)


class LooksAtGradients(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (1.0 if self.first.weight.grad is None else 0.5)


class LooksAtMarks(Net):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch) * getattr(batch, "scale", 1.0)


class Checks(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        assert torch.isfinite(hidden).all(), "not a number"
        return torch.sigmoid(hidden)


class Attends(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = hidden.view(1, 2, len(hidden), 16)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).reshape(len(hidden), 32)


class ByPatchedFunction(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(hidden)


class ReturnsViews(Net):
    def forward(self, batch: torch.Tensor) -> Any:
        output = super().forward(batch)
        return output, output[:, :2], output.detach()


class ReturnsBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, batch: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(batch))
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return self.second(hidden), self.mean


class Doubled(TorchFunctionMode):
    """Changes what a function of torch does while it is active."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.sigmoid else result


def around(scope: Any) -> Any:
    """The usual step inside a context, from the tenth on."""

    def step(state: State, batch: torch.Tensor, number: int) -> float:
        with scope() if number >= 10 else contextlib.nullcontext():
            return usual_step(state, batch, number)

    return step


def closed_over_object() -> ByFunction:
    config = Config()

    def scaled(hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * config.scale

    model = ByFunction(function=scaled)
    model.first.settings = config
    return model


def marked_step(state: State, batch: torch.Tensor, number: int) -> float:
    batch.scale = level(number)
    return usual_step(state, batch, number)


def printed_step(state: State, batch: torch.Tensor, number: int) -> float:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        loss = usual_step(state, batch, number)
    state.printed = getattr(state, "printed", "") + printed.getvalue()
    return loss


def timed_step(state: State, batch: torch.Tensor, number: int) -> float:
    start = time.perf_counter_ns()
    loss = usual_step(state, batch, number)
    state.in_order = [*getattr(state, "in_order", []), start < state.model.called_at < time.perf_counter_ns()]
    return loss


def numbered_step(state: State, batch: torch.Tensor, number: int) -> float:
    loss = usual_step(state, batch, number)
    state.numbers = [*getattr(state, "numbers", []), state.model.number]
    return loss


def number_anew(state: State) -> None:
    global NUMBERS
    NUMBERS = itertools.count()


def change_view(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    output, view, _ = state.model(batch)
    view.mul_(0.5)
    return loss_of(output, batch)


def read_through_detached(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    output, _, detached = state.model(batch)
    detached.mul_(0.5)
    return loss_of(output, batch)


def keep_outputs(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    output = state.model(batch)
    state.outputs = [*getattr(state, "outputs", []), output]
    return loss_of(output, batch)


def keep_buffer(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    output, mean = state.model(batch)
    state.means = [*getattr(state, "means", []), mean]
    return loss_of(output, batch)


def hook_all_modules(state: State) -> None:
    state.seen = []
    state.handle = register_module_forward_hook(lambda module, args, output: state.seen.append(type(module).__name__))


def go_on_with_shallow_copy(state: State, number: int) -> None:
    if number == 10:
        state.model = copy.copy(state.model)
        state.model.config = Config(2.0)


ORIGINAL_GELU = nn.functional.gelu


def patch_gelu(state: State, number: int) -> None:
    nn.functional.gelu = torch.tanh if number >= 10 else ORIGINAL_GELU


def share_layer(state: State) -> None:
    state.other = Net()
    state.other.first = state.model.first


def fit_both(state: State, sample: torch.Tensor) -> None:
    fit(state.model, sample)
    fit(state.other, sample)


def of_both(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of(state.model(batch), batch) + loss_of(state.other(batch + 1), batch)


PATTERNS = [
    Pattern(
        name="a global object asked by a method, its number changed",
        make=BySchedule,
        change=lambda state, number: setattr(SCHEDULE, "scale", level(number)),
        end=lambda state: setattr(SCHEDULE, "scale", 1.0),
    ),
    Pattern(
        name="an attribute of an object in a closure changed",
        make=closed_over_object,
        change=lambda state, number: setattr(state.model.first.settings, "scale", level(number)),
    ),
    Pattern(
        name="a multiprocessing.Value on self changed",
        make=lambda: BySharedValue(shared=multiprocessing.Value("d", 1.0)),
        change=lambda state, number: setattr(state.model.shared, "value", level(number)),
    ),
    Pattern(
        name="a setting in a UserDict on self changed",
        make=lambda: ByUserDict(settings=UserDict(scale=1.0)),
        change=lambda state, number: state.model.settings.update(scale=level(number)),
    ),
    Pattern(
        name="print in the forward",
        make=Prints,
        step=printed_step,
        beside=lambda state: state.printed,
        outcome=LEFT + "the forward prints",
    ),
    Pattern(
        name="the time of the call kept on self",
        make=KeepsTime,
        step=timed_step,
        beside=lambda state: state.in_order,
        outcome=LEFT + "the forward calls time.",
    ),
    Pattern(
        name="the number of the call kept on self, from a global iterator",
        make=NumbersItsCalls,
        start=number_anew,
        step=numbered_step,
        beside=lambda state: state.numbers,
        outcome="the forward moves on an iterator",
    ),
    Pattern(
        name="a forward that looks whether there is a gradient",
        make=LooksAtGradients,
        step=accumulating_step,
        outcome=LEFT + "reads .grad of a tensor",
    ),
    Pattern(
        name="an attribute on the batch tensor, read by the forward",
        make=LooksAtMarks,
        step=marked_step,
    ),
    Pattern(
        name="an assertion on values in the forward",
        make=Checks,
        outcome=LEFT + "the code asks for the value of a tensor",
        slow=True,
    ),
    Pattern(
        name="another attention kernel chosen (sdpa_kernel)",
        make=Attends,
        step=around(lambda: sdpa_kernel(SDPBackend.MATH)),
    ),
    Pattern(
        name="a TorchFunctionMode around the step",
        make=Net,
        step=around(Doubled),
    ),
    Pattern(
        name="a function of torch's replaced by another",
        make=ByPatchedFunction,
        change=patch_gelu,
        end=lambda state: setattr(nn.functional, "gelu", ORIGINAL_GELU),
    ),
    Pattern(
        name="a forward hook on all modules, registered after the fit",
        make=Net,
        fit=fit_with_room,
        start=hook_all_modules,
        beside=lambda state: state.seen,
        end=lambda state: state.handle.remove(),
        outcome=LEFT + "all modules have the hook",
    ),
    Pattern(name="an output that is a view of another, changed in place", make=ReturnsViews, step=step_of(change_view)),
    Pattern(name="a detached output changed in place", make=ReturnsViews, step=step_of(read_through_detached)),
    Pattern(name="all outputs kept", make=Normed, step=step_of(keep_outputs), beside=lambda state: state.outputs),
    Pattern(
        name="a buffer returned and kept",
        make=ReturnsBuffer,
        step=step_of(keep_buffer),
        beside=lambda state: state.means,
    ),
    Pattern(
        name="training goes on with a shallow copy, its config another",
        make=lambda: ByConfig(config=Config()),
        change=go_on_with_shallow_copy,
    ),
    Pattern(
        name="two fitted models that share a layer",
        make=Net,
        before_fit=share_layer,
        fit=fit_both,
        step=step_of(of_both),
        beside=lambda state: state.other,
    ),
]
