"""Small models, batches and losses to estimate a training step of."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training step: model, batch, loss, and the context the forward runs in."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    around: Callable[[], Any] = contextlib.nullcontext
    whole: bool = False  # backward and optimizer step run in that context too


def cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def mean_square(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def bfloat16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


def channels_last_images() -> tuple[torch.Tensor, torch.Tensor]:
    pixels, labels = images()
    return pixels.to(memory_format=torch.channels_last), labels


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 32, 64), torch.randn(8, 32, 64)


def words(vocabulary: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(vocabulary, shape), torch.randint(vocabulary, shape)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def half_frozen() -> nn.Module:
    model = convolutions()
    model[:2].requires_grad_(False)
    return model


def biases_only() -> nn.Module:
    model = half_frozen()
    model[3].weight.requires_grad_(False)
    return model


def tied() -> nn.Module:
    layers = [nn.Linear(256, 256) for _ in range(3)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.dropout = nn.Dropout(0.5)
        self.lstm = nn.LSTM(64, 64, num_layers=2, dropout=0.5, batch_first=True)
        self.decoder = nn.Linear(64, 500)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.dropout(self.embedding(tokens)))
        return self.decoder(self.dropout(states))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(64, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(x)[0]


class TimeFirst(nn.Module):
    """Applies a linear layer to a transposed batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.transpose(0, 1))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x
