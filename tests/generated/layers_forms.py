"""Attention in less common forms: windows, biases, masks of batches, other widths, whole stacks."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from generated.layer import Layer, Stream, divisor, layer


def _padding_mask(x: torch.Tensor) -> torch.Tensor:
    """Which places are padding: a few at the end, more in later samples; never the first."""
    lengths = (x.shape[1] - torch.arange(x.shape[0])).clamp(min=1)
    return torch.arange(x.shape[1]) >= lengths.unsqueeze(1)


@layer("multihead options")
class MultiheadOptions(Layer):
    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "other_widths": rng.random() < 0.3,
            "zero": rng.random() < 0.3,
            "bias_kv": rng.random() < 0.3,
            "padded": rng.random() < 0.5,
            "averaged": rng.random() < 0.5,
            "weights": rng.random() < 0.5,
            "shorter": rng.random() < 0.3,
            "by_head": rng.random() < 0.3,
        }

    def __init__(
        self,
        stream: Stream,
        other_widths: bool,
        zero: bool,
        bias_kv: bool,
        padded: bool,
        averaged: bool,
        weights: bool,
        shorter: bool,
        by_head: bool,
    ) -> None:
        super().__init__(stream)
        width = stream.channels
        self.padded, self.averaged, self.weights, self.shorter = padded, averaged, weights, shorter
        self.heads = divisor(width, 2)
        self.widen = nn.Linear(width, width + 2) if other_widths else nn.Identity()
        other = width + 2 if other_widths else None
        self.bias = nn.Parameter(torch.zeros(1)) if by_head else None
        self.inner = nn.MultiheadAttention(
            width,
            self.heads,
            0.1,
            add_bias_kv=bias_kv,
            add_zero_attn=zero,
            kdim=other,
            vdim=other,
            batch_first=True,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.widen(x)
        queries = x[:, : max(1, x.shape[1] // 2)] if self.shorter else x
        mask = None
        if self.bias is not None:
            ones = torch.ones(x.shape[0] * self.heads, queries.shape[1], x.shape[1], dtype=x.dtype)
            mask = ones * self.bias.to(x.dtype)
        padding = _padding_mask(x) if self.padded else None
        if padding is not None and mask is not None:
            padding = torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, -9.0)
        y, weights = self.inner(
            queries,
            keys,
            keys,
            key_padding_mask=padding,
            need_weights=self.weights,
            attn_mask=mask,
            average_attn_weights=self.averaged,
        )
        return y if weights is None else y + weights.mean()


@layer("transformer")
class Transformer(Layer):
    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "how": rng.choice(("whole", "encoder", "decoder")),
            "norm_first": rng.random() < 0.5,
            "dropout": rng.choice((0.0, 0.1)),
            "causal": rng.random() < 0.5,
            "padded": rng.random() < 0.4,
            "bias": rng.random() < 0.7,
        }

    def __init__(
        self, stream: Stream, how: str, norm_first: bool, dropout: float, causal: bool, padded: bool, bias: bool
    ) -> None:
        super().__init__(stream)
        width = stream.channels
        self.how, self.causal, self.padded = how, causal, padded
        options: dict[str, Any] = {"norm_first": norm_first, "bias": bias, "batch_first": True}
        heads = divisor(width, 2)
        self.inner: nn.Module
        if how == "whole":
            self.inner = nn.Transformer(width, heads, 1, 1, 2 * width, dropout, F.gelu, **options)
        elif how == "encoder":
            one = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, **options)
            self.inner = nn.TransformerEncoder(one, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        else:
            other = nn.TransformerDecoderLayer(width, heads, 2 * width, dropout, **options)
            self.inner = nn.TransformerDecoder(other, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.causal else None
        padding = _padding_mask(x) if self.padded else None
        if padding is not None and mask is not None:
            padding = torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, -9.0)
        if self.how == "encoder":
            return self.inner(x, mask=mask, src_key_padding_mask=padding, is_causal=self.causal)
        if self.how == "decoder":
            return self.inner(x, x.roll(1, 1), tgt_mask=mask, tgt_key_padding_mask=padding)
        return self.inner(x, x.flip(1), tgt_mask=mask, src_key_padding_mask=padding)


@layer("attention form")
class AttentionForm(Layer):
    takes = ("sequence",)

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(sorted(FORMS)), "heads": rng.choice((1, 2))}

    def __init__(self, stream: Stream, how: str, heads: int) -> None:
        super().__init__(stream)
        width, length = stream.channels, stream.shape[1]
        self.how, self.heads = how, divisor(width, heads)
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(2 * length - 1, self.heads) * 0.1)
        self.memory = nn.Parameter(torch.randn(1, self.heads, 2, width // self.heads) * 0.3)
        places = torch.arange(length)
        self.register_buffer("apart", places.unsqueeze(1) - places + length - 1, persistent=False)
        self.heat = nn.Parameter(torch.ones(self.heads, 1, 1))
        self.talk = nn.Linear(self.heads, self.heads, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        return self.out(FORMS[self.how](self, query, key, value).transpose(1, 2).flatten(2))


Heads = torch.Tensor  # (batch, heads, time, width)


def _relative(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    bias = block.table[block.apart].permute(2, 0, 1).unsqueeze(0)
    return F.scaled_dot_product_attention(query, key, value, bias.to(query.dtype))


def _slopes(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    apart = -(block.apart - query.shape[2] + 1).abs().to(query.dtype)
    bias = apart * torch.tensor([0.5**each for each in range(block.heads)], dtype=query.dtype).view(-1, 1, 1)
    return F.scaled_dot_product_attention(query, key, value, bias.expand(query.shape[0], -1, -1, -1), scale=0.3)


def _windows(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    size = divisor(query.shape[2], 4)
    shifted = (each.roll(1, 2).unflatten(2, (-1, size)) for each in (query, key, value))
    return F.scaled_dot_product_attention(*shifted).flatten(2, 3).roll(-1, 2)


def _linear(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    query, key = F.elu(query) + 1, F.elu(key) + 1
    total = torch.einsum("bhtd,bhd->bht", query, key.sum(2))
    return torch.einsum("bhtd,bhde,bht->bhte", query, torch.einsum("bhtd,bhte->bhde", key, value), 1 / (total + 1e-3))


def _remembering(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    memory = block.memory.to(key.dtype).expand(key.shape[0], -1, -1, -1)
    key, value = torch.cat([memory, key], 2), torch.cat([memory * 0.5, value], 2)
    return F.scaled_dot_product_attention(query, key, value)


def _talking(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    scores = block.talk((query @ key.mT).movedim(1, -1)).movedim(-1, 1).softmax(-1)
    return block.talk(scores.movedim(1, -1)).movedim(-1, 1) @ value


def _unit(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    scores = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
    return (scores * block.heat.clamp(max=2).exp()).softmax(-1) @ value


def _plain_math(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _grouped(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    return F.scaled_dot_product_attention(query, key[:, :1], value[:, :1], enable_gqa=True)


def _three_axes(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    flat = (each.flatten(0, 1) for each in (query, key, value))
    return F.scaled_dot_product_attention(*flat, dropout_p=0.1).unflatten(0, query.shape[:2])


def _chunks(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    return torch.cat([((part @ key.mT) * 0.3).softmax(-1) @ value for part in query.split(4, 2)], 2)


def _additive(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    scores = (query.unsqueeze(3) + key.unsqueeze(2)).tanh().sum(-1)
    return scores.softmax(-1) @ value


def _sparse(block: AttentionForm, query: Heads, key: Heads, value: Heads) -> Heads:
    scores = query @ key.mT
    least = scores.topk(min(3, scores.shape[-1]), -1).values[..., -1:]
    return scores.masked_fill(scores < least, float("-inf")).softmax(-1) @ value


FORMS = {
    "relative": _relative,
    "slopes": _slopes,
    "windows": _windows,
    "linear": _linear,
    "remembering": _remembering,
    "talking": _talking,
    "unit": _unit,
    "math": _plain_math,
    "grouped": _grouped,
    "three axes": _three_axes,
    "chunks": _chunks,
    "additive": _additive,
    "sparse": _sparse,
}
