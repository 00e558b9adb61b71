"""What a forward asks of its own tensors, and puts on them."""

from typing import Any

import torch
from torch import nn

from patterns.models import Net
from patterns.pattern import LEFT, Pattern, State, fit_with_room, loss_of, step_of


class Scale(nn.Parameter):
    """A parameter of a class of its own."""


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


class AsksTypes(Net):
    """Has a number for each question that is answered as in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale(torch.ones(()))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.first.weight
        answers = [
            type(weight) is nn.Parameter,
            type(hidden) is torch.Tensor,
            hidden.__class__.__name__ == "Tensor",
            isinstance(self.scale, Scale),
            type(weight.data) is torch.Tensor,
        ]
        return torch.sigmoid(hidden) * self.scale * (1 + sum(answers))


class AsksMark(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden) * (2 if getattr(self.first.weight, "is_expert", False) else 3)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(self.first.out_features, self.first.out_features, bias=False)
        self.fourth = nn.Linear(self.first.out_features, self.first.out_features, bias=False)
        self.fourth.weight = self.third.weight

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        factor = 2 if self.third.weight is self.fourth.weight else 3
        return torch.sigmoid(self.fourth(self.third(hidden))) * factor


class MarksBatch(Net):
    def forward(self, batch: Any) -> torch.Tensor:
        batch.seen = True
        return super().forward(batch)


class WantsGradient(Net):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch.requires_grad_())


def mark(state: State, number: int) -> None:
    state.model.first.weight.is_expert = number % 3 == 0


def in_class(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    given = batch.as_subclass(Tagged) if number % 2 else batch
    return loss_of(state.model(given).as_subclass(torch.Tensor), batch)


PATTERNS = [
    Pattern(name="classes of weights and of values asked by the forward", make=AsksTypes),
    Pattern(
        name="an attribute of a parameter asked by the forward, changed", make=AsksMark, fit=fit_with_room, change=mark
    ),
    Pattern(name="a subclass of torch.Tensor given in some steps", make=Net, step=step_of(in_class)),
    Pattern(
        name="two tied weights compared by `is`",
        make=Tied,
        outcome=LEFT + "asks whether two objects are the same",
    ),
    Pattern(
        name="an attribute put on the batch by the forward",
        make=MarksBatch,
        outcome=LEFT + "puts the attribute 'seen' on a tensor",
    ),
    Pattern(
        name="requires_grad_() on the batch in the forward",
        make=WantsGradient,
        outcome=LEFT + "sets requires_grad of an argument",
    ),
    Pattern(
        name="a sparse matrix as the sample",
        make=Net,
        fit=lambda state, batch: fit_with_room(state, (batch.to_sparse(),)),
        outcome="is sparse",
    ),
]
