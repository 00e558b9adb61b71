"""What is read, changed or looked at between the forward and the backward pass, and in the backward pass itself."""

from typing import Any

import torch
from torch import nn

from patterns.changed import assign
from patterns.models import Net
from patterns.pattern import Pattern, State, loss_of, step_of

SETTINGS = {"clip": 1.0}


def of_global(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * SETTINGS["clip"]


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return of_global(gradient)


class ClipsByGlobal(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(Clipped.apply(hidden))


class OfModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.module.clip, None


class KeepsModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.clip = 1.0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(OfModule.apply(hidden, self))


class HooksByMethod(KeepsModule):
    def clipped(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.clip

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden.register_hook(self.clipped)
        return torch.sigmoid(hidden)


class AsksForNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return hidden.sin(), hidden.cos()

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor:
        return torch.full((32, 32), 0.1) if second is None or first is None else first - second


class TwoOfOne(Net):
    """Returns scores, and a feature that comes from the same function."""

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = AsksForNone.apply(torch.tanh(self.first(batch)))
        return self.second(first), second


class FeatureOfOne(Net):
    """Returns scores and a feature that come from the same result of a function; the other result is not used."""

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, _ = AsksForNone.apply(torch.tanh(self.first(batch)))
        return self.second(first), first.square().sum(1)


class ReturnsFeature(Net):
    """Returns scores, and the feature they are computed from."""

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(batch))
        return self.second(torch.sigmoid(hidden)), hidden


def clip_late(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    SETTINGS["clip"] = 1.0
    loss = loss_of(state.model(batch), batch)
    SETTINGS["clip"] = 1.0 + number
    return loss


def clip_of_module_late(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    loss = loss_of(state.model(batch), batch)
    state.model.clip = 1.0 + number
    return loss


def first_alone(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of(state.model(batch)[0], batch)


def of_both(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    scores, feature = state.model(batch)
    return loss_of(scores, batch) + 0.1 * feature.square().mean()


def hook_on_feature(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    scores, feature = state.model(batch)
    feature.register_hook(lambda gradient: 2 * gradient)
    return loss_of(scores, batch) + feature.mean()


def retain_on_feature(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    scores, feature = state.model(batch)
    feature.retain_grad()
    return loss_of(scores, batch)


def hook_on_scores(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    scores, feature = state.model(batch)
    scores.register_hook(lambda gradient: 2 * gradient)
    return loss_of(scores, batch) + 0.1 * feature.mean()


def gradient_of_feature(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    """The norm of the gradient at a shared feature, as losses are balanced by it."""
    outputs = state.model(batch)
    loss = sum(each.square().mean() for each in outputs)
    (gradient,) = torch.autograd.grad(loss, outputs[-1], retain_graph=True)
    return loss / gradient.norm()


def forget_clip(state: State) -> None:
    SETTINGS["clip"] = 1.0


BETWEEN = "between forward and backward; a hook or a function of the backward pass reads it"

PATTERNS = [
    Pattern(
        name="a global read by a helper of a backward, changed before the step",
        make=ClipsByGlobal,
        change=lambda state, number: SETTINGS.update(clip=1.0 + number // 5),
        end=forget_clip,
    ),
    Pattern(
        name="a global read by a helper of a backward, changed after the forward",
        make=ClipsByGlobal,
        step=step_of(clip_late),
        end=forget_clip,
        outcome=BETWEEN,
    ),
    Pattern(
        name="a number of a module that a function keeps for its backward, changed before the step",
        make=KeepsModule,
        change=assign("clip", lambda n: 1.0 + n // 5),
    ),
    Pattern(
        name="a number read by a bound method as a tensor hook, changed before the step",
        make=HooksByMethod,
        change=assign("clip", lambda n: 1.0 + n // 5),
    ),
    Pattern(
        name="a number read by a bound method as a tensor hook, annealed after the forward",
        make=HooksByMethod,
        step=step_of(clip_of_module_late),
        outcome=BETWEEN,
    ),
    Pattern(name="set_materialize_grads(False), all outputs used", make=TwoOfOne, step=step_of(of_both)),
    Pattern(
        name="set_materialize_grads(False) behind two outputs, one of them used",
        make=FeatureOfOne,
        step=step_of(first_alone),
    ),
    Pattern(
        name="set_materialize_grads(False), one of two outputs used",
        make=TwoOfOne,
        step=step_of(first_alone),
        outcome="asks for None where none arrives",
    ),
    Pattern(name="a feature returned beside the scores", make=ReturnsFeature, step=step_of(of_both)),
    Pattern(
        name="a tensor hook on a feature that is returned beside the scores",
        make=ReturnsFeature,
        step=step_of(hook_on_feature),
        outcome="register_hook is called on an output from which other outputs are computed",
    ),
    Pattern(
        name="retain_grad on a feature that is returned beside the scores",
        make=ReturnsFeature,
        step=step_of(retain_on_feature),
        outcome="retain_grad is called on an output from which other outputs are computed",
    ),
    Pattern(
        name="torch.autograd.grad with respect to a feature that is returned beside the scores",
        make=ReturnsFeature,
        step=step_of(gradient_of_feature),
        outcome="the gradient of an output is asked for",
    ),
    Pattern(name="a tensor hook on scores beside a feature", make=ReturnsFeature, step=step_of(hook_on_scores)),
]
