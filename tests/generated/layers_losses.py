"""Losses inside of a model: auxiliary terms that are added to what flows through."""

import random
from typing import Any

import torch
from torch import nn

from generated.layer import Layer, Stream, full_precision, layer
from generated.losses import LOSSES, rows_of


@layer("loss inside")
class LossInside(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(sorted(LOSSES))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            loss = LOSSES[self.how](rows_of(full_precision(x)))
        return x + 0.1 * loss.to(x.dtype)


@layer("adaptive softmax")
class AdaptiveSoftmax(Layer):
    """Which rows go where depends on the targets' values."""

    takes = ("rows",)

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.inner = nn.AdaptiveLogSoftmaxWithLoss(stream.channels, 12, [4, 8], head_bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x, torch.arange(len(x)) % 12).loss
