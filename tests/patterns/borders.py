"""Models that are planned part by part: what is used on both sides of a border."""

import torch
from torch import nn

from patterns.models import Blocks
from patterns.pattern import Pattern, fit_with_room


class Looks(Blocks):
    """Looks at values, so that it is planned by its parts."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(batch)
        if hidden.mean() > 1e9:
            raise ValueError("too large")
        return self.around(hidden)

    def around(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Residual(nn.Module):
    """Uses what it is given three times."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.change = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.sigmoid(self.gate(hidden)) * torch.tanh(self.change(hidden))


class Skips(Looks):
    """Adds what all blocks are given to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def around(self, hidden: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.blocks:
            kept.append(hidden)
            hidden = block(hidden)
        return hidden + sum(each.sin() for each in kept)


class EarlySkips(Skips):
    """Uses what blocks are given before they are called."""

    def around(self, hidden: torch.Tensor) -> torch.Tensor:
        total = hidden.sin()
        for block in self.blocks:
            total = total + hidden.sin()
            hidden = block(hidden)
        return total + hidden


class Twice(nn.Module):
    """Uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(hidden))))


class SharedWeights(Looks):
    """Calls a block again that uses its weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Twice()] * 3)


LOOKS = "is used several times inside and later outside"

PATTERNS = [
    Pattern(
        name="parts with residuals inside, whose inputs are added to the result of the model",
        make=Skips,
        fit=fit_with_room,
        outcome=LOOKS,
    ),
    Pattern(name="parts with residuals inside, and skips before them", make=EarlySkips, fit=fit_with_room),
    Pattern(
        name="a part that uses its weights twice, called three times",
        make=SharedWeights,
        fit=fit_with_room,
        outcome=LOOKS,
    ),
    Pattern(name="parts in a chain", make=Looks, fit=fit_with_room),
]
