"""Small models that cannot be captured whole, with parts that can."""

import torch
from torch import nn

WIDTH = 8


def block(width: int = WIDTH, depth: int = 2) -> nn.Sequential:
    """Convolutions with BatchNorm, ReLU and dropout."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.2))


class Branching(nn.Module):
    """Asks for a value of the batch between two blocks of equal structure, and a third behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.first = block()
        self.second = block()
        self.last = block(depth=3)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.first(self.stem(images))
        if features.mean() > -1.0:
            features = self.second(features)
        features = self.last(features)
        logits: torch.Tensor = self.head(features.mean((2, 3)))
        return logits.square().mean()


class Experts(nn.Module):
    """Every row goes to one of the experts, as its own values say."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(*(_layer(width) for _ in range(3)))
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Sequential(_layer(width), _layer(width)) for _ in range(2))
        self.end = nn.Sequential(*(_layer(width) for _ in range(3)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.body(rows)
        scores = self.router(rows).softmax(-1)
        weight, expert = scores.max(-1)
        mixed = torch.zeros_like(rows)
        for number, each in enumerate(self.experts):
            (chosen,) = (expert == number).nonzero(as_tuple=True)
            if len(chosen):
                mixed = mixed.index_add(0, chosen, each(rows[chosen]) * weight[chosen, None])
        return self.end(rows + mixed).square().mean()


def _layer(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1))


class Recurrent(nn.Module):
    """An LSTM with dropout between its layers, among blocks of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), block())
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.4, batch_first=True)
        self.after = block()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.before(images)
        states, _ = self.lstm(features.flatten(2).transpose(1, 2))
        if states.isnan().any():
            raise ValueError("the states are not numbers")
        return self.after(states.transpose(1, 2).unflatten(2, features.shape[2:]).contiguous()).square().mean()


class Repeated(nn.Module):
    """One block is called twice, another with two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.shared = block()
        self.resized = block()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.shared(self.stem(images))
        if float(features.detach().mean()) > -1.0:
            features = self.shared(features)
        small = self.resized(nn.functional.avg_pool2d(features, 2))
        return (self.resized(features).mean() + small.mean()).square()


class Nothing(nn.Module):
    """No part of it can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Asking()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows) if (rows * self.inner.weight).mean() > -9.0 else rows


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight if (rows * self.weight).sum() > -9.0 else -rows * self.weight


def images(count: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32)


def rows(count: int = 2048) -> torch.Tensor:
    return torch.randn(count, 64)


CASES = {"branching": (Branching, images), "experts": (Experts, rows), "recurrent": (Recurrent, images)}
