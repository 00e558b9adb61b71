"""Embeddings and bags in the middle of a model, looked up by codes that values give."""

import random
from typing import Any

import torch
from torch import nn

from generated.layer import Layer, Stream, layer


@layer("lookup")
class Lookup(Layer):
    takes = ("rows", "sequence")

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "padding": rng.random() < 0.4,
            "longest": rng.random() < 0.15,
            "by_frequency": rng.random() < 0.2,
            "sparse": rng.random() < 0.1,
            "shared": rng.random() < 0.3,
        }

    def __init__(
        self, stream: Stream, padding: bool, longest: bool, by_frequency: bool, sparse: bool, shared: bool
    ) -> None:
        super().__init__(stream)
        self.inner = nn.Embedding(
            8,
            stream.channels,
            padding_idx=0 if padding else None,
            max_norm=1.0 if longest else None,
            scale_grad_by_freq=by_frequency,
            sparse=sparse and not (by_frequency or shared),
        )
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = (x.detach().float().sum(-1) * 3).long().remainder(8)
        y = x + self.inner(codes)
        return y * (x @ self.inner.weight.t().to(x.dtype)).mean() if self.shared else y


@layer("bag")
class Bag(Layer):
    takes = ("sequence",)
    makes = "rows"

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "mode": rng.choice(("sum", "mean", "max")),
            "weighted": rng.random() < 0.5,
            "flat": rng.random() < 0.4,
            "padding": rng.random() < 0.3,
            "sparse": rng.random() < 0.1,
        }

    def __init__(self, stream: Stream, mode: str, weighted: bool, flat: bool, padding: bool, sparse: bool) -> None:
        super().__init__(stream)
        self.flat, self.weighted = flat, weighted and mode == "sum"
        self.inner = nn.EmbeddingBag(
            8, stream.channels, mode=mode, padding_idx=0 if padding else None, sparse=sparse and mode != "max"
        )
        self.weigh = nn.Linear(stream.channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = (x.detach().float().sum(-1) * 3).long().remainder(8)
        weights = self.weigh(x).squeeze(-1).to(self.inner.weight.dtype) if self.weighted else None
        y = x.mean(1)
        if not self.flat:
            return y + self.inner(codes, per_sample_weights=weights)
        starts = torch.arange(0, codes.numel(), codes.shape[1])
        return y + self.inner(codes.flatten(), starts, None if weights is None else weights.flatten())
