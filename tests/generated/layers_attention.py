"""Attention in its forms, for sequences."""

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from generated.layer import Layer, Stream, divisor, layer

MASKS = ("none", "causal", "bool", "float", "padding")


def mask_of(kind: str, length: int, dtype: torch.dtype) -> torch.Tensor | None:
    """What may not be looked at: False, or a large negative number."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if kind == "none":
        return None
    if kind == "padding":
        seen = (torch.arange(length) < max(1, length - 1)).expand(length, length)
    return seen if kind in ("causal", "bool", "padding") else torch.zeros(length, length, dtype=dtype).where(seen, -9.0)


@layer("attention")
class Attention(Layer):
    """Written out by hand, or `scaled_dot_product_attention`."""

    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "heads": rng.choice((1, 2, 4)),
            "how": rng.choice(("by hand", "in place", "einsum", "baddbmm", "fused", "fused")),
            "mask": rng.choice(MASKS),
            "dropout": rng.choice((0.0, 0.0, 0.2)),
            "joint": rng.random() < 0.5,
        }

    def __init__(self, stream: Stream, heads: int, how: str, mask: str, dropout: float, joint: bool) -> None:
        super().__init__(stream)
        width = stream.channels
        self.heads, self.how, self.mask, self.dropout = divisor(width, heads), how, mask, dropout
        self.joint = nn.Linear(width, 3 * width) if joint else None
        self.parts = None if joint else nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.joint is not None:
            thirds = self.joint(x).chunk(3, dim=-1)
        else:
            assert self.parts is not None
            thirds = tuple(part(x) for part in self.parts)
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in thirds)
        seen = self._attended(query, key, value, mask_of(self.mask, x.shape[1], query.dtype))
        return self.out(seen.transpose(1, 2).flatten(2))

    def _attended(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        rate = self.dropout if self.training else 0.0
        if self.how == "fused":
            causal = self.mask == "causal"
            return F.scaled_dot_product_attention(query, key, value, None if causal else mask, rate, is_causal=causal)
        weights = self._weights(query, key) / math.sqrt(query.shape[-1])
        if mask is not None and mask.dtype == torch.bool:
            weights = weights.masked_fill_(~mask, -9.0) if self.how == "in place" else weights.masked_fill(~mask, -9.0)
        elif mask is not None:
            weights = weights + mask
        weights = F.dropout(weights.softmax(-1), rate, inplace=self.how == "in place")
        return torch.einsum("bhqk,bhkd->bhqd", weights, value) if self.how == "einsum" else weights @ value

    def _weights(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if self.how == "einsum":
            return torch.einsum("bhqd,bhkd->bhqk", query, key)
        if self.how == "baddbmm":
            many, others = query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
            start = torch.zeros(many.shape[0], many.shape[1], others.shape[2], dtype=many.dtype)
            return torch.baddbmm(start, many, others, beta=0, alpha=0.5).unflatten(0, query.shape[:2])
        return query @ key.transpose(-2, -1)


@layer("multihead attention")
class MultiheadAttention(Layer):
    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "heads": rng.choice((1, 2, 4)),
            "mask": rng.choice(MASKS),
            "dropout": rng.choice((0.0, 0.2)),
            "weights": rng.random() < 0.4,
            "batch_first": rng.random() < 0.6,
            "bias": rng.random() < 0.8,
        }

    def __init__(
        self, stream: Stream, heads: int, mask: str, dropout: float, weights: bool, batch_first: bool, bias: bool
    ) -> None:
        super().__init__(stream)
        width = stream.channels
        self.mask, self.weights, self.batch_first = mask, weights, batch_first
        self.inner = nn.MultiheadAttention(
            width, divisor(width, heads), dropout=dropout, batch_first=batch_first, bias=bias, add_bias_kv=not bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = mask_of(self.mask, x.shape[1], x.dtype)
        if mask is not None and mask.dtype == torch.bool:
            mask = ~mask
        states = x if self.batch_first else x.transpose(0, 1)
        states, weights = self.inner(states, states, states, need_weights=self.weights, attn_mask=mask)
        states = states if self.batch_first else states.transpose(0, 1)
        return states if weights is None else states * weights.amax()


@layer("transformer block")
class TransformerBlock(Layer):
    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "heads": rng.choice((1, 2)),
            "norm_first": rng.random() < 0.5,
            "active": rng.choice(("relu", "gelu")),
            "dropout": rng.choice((0.0, 0.1)),
            "decoder": rng.random() < 0.3,
        }

    def __init__(
        self, stream: Stream, heads: int, norm_first: bool, active: str, dropout: float, decoder: bool
    ) -> None:
        super().__init__(stream)
        kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
        width = stream.channels
        self.decoder = decoder
        self.inner = kind(
            width, divisor(width, heads), 2 * width, dropout, active, batch_first=True, norm_first=norm_first
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x.flip(1)) if self.decoder else self.inner(x)


@layer("cross attention")
class CrossAttention(Layer):
    """Attention of learned queries, fewer keys than heads of queries, and rotated positions."""

    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"queries": rng.choice((2, 5)), "rotary": rng.random() < 0.5}

    def __init__(self, stream: Stream, queries: int, rotary: bool) -> None:
        super().__init__(stream)
        width = 8
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.key, self.value = nn.Linear(stream.channels, 4), nn.Linear(stream.channels, 4)
        self.rotary, self.out = rotary, nn.Linear(width, stream.channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.queries.expand(x.shape[0], -1, -1).unflatten(-1, (2, 4)).transpose(1, 2)
        key, value = self.key(x).unsqueeze(1), self.value(x).unsqueeze(1)
        if self.rotary:
            key = self._rotated(key)
        key, value = (each.expand(-1, 2, -1, -1) for each in (key, value))
        seen = F.scaled_dot_product_attention(query.to(key.dtype), key, value)
        return self.out(seen.transpose(1, 2).flatten(2))

    def _rotated(self, key: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(key.shape[-2], dtype=key.dtype).unsqueeze(-1) / torch.tensor([1.0, 10.0], dtype=key.dtype)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        one, other = key.chunk(2, -1)
        return key * cos + torch.cat([-other, one], -1) * sin
