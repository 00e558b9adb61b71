"""A small language model with nothing fused: norms, attention, loss and AdamW are written out, as in courses.

When a local variable lets a tensor go decides where the next one finds room, so functions hold what those of the
recorded steps hold: allocations and releases come in the recorded order.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        dtype = values.dtype
        values = values.to(torch.float32)
        scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self._eps)
        values = values * scale
        return (self.weight * values).to(dtype)


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", values, self.weight)


class Attention(nn.Module):
    """Causal attention over several heads, with rotary positions."""

    turns: torch.Tensor

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self._heads = heads
        self.query, self.key, self.value, self.output = (Linear(width, width) for _ in range(4))
        rates = 10000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.einsum("i,j->ij", torch.arange(context), rates)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        length = values.shape[-2]
        query, key, value = (
            self._split(self.query(values)),
            self._split(self.key(values)),
            self._split(self.value(values)),
        )
        query = self._turned(query, length)
        key = self._turned(key, length)
        places = torch.arange(length, device=values.device)
        mask = places[:, None] >= places[None, :]
        attended = attend(query, key, value, mask)
        attended = attended.transpose(1, 2).contiguous()
        result: torch.Tensor = self.output(attended.view(*attended.shape[:2], -1))
        return result

    def _split(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(*values.shape[:-1], self._heads, -1).transpose(1, 2)

    def _turned(self, values: torch.Tensor, length: int) -> torch.Tensor:
        first, second = values.unflatten(-1, (-1, 2)).unbind(-1)
        cosine, sine = self.turns[:, :length]
        turned = (cosine * first - sine * second, sine * first + cosine * second)
        return torch.stack(turned, -1).flatten(-2).contiguous()


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(query.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


def softmax(values: torch.Tensor) -> torch.Tensor:
    shifted = values - torch.max(values, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(width, inner), Linear(inner, width), Linear(width, inner)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        gate = self.w1(values)
        result: torch.Tensor = self.w2(gate * torch.sigmoid(gate) * self.w3(values))
        return result


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention, self.feed_forward = Attention(width, heads, context), FeedForward(width, inner)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        attended = self.attention(self.norm1(values))
        middle = values + attended
        fed = self.feed_forward(self.norm2(middle))
        result: torch.Tensor = middle + fed
        return result


class Embedding(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens, :]


class CourseLM(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, vocabulary: int, context: int, width: int, inner: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, inner, heads, context) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.embedding(tokens)
        for block in self.blocks:
            values = block(values)
        result: torch.Tensor = self.head(self.norm(values))
        return result


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = -log_softmax(logits)
    return losses.gather(-1, targets.unsqueeze(-1)).mean()


def log_softmax(values: torch.Tensor) -> torch.Tensor:
    values = values - torch.max(values, dim=-1, keepdim=True)[0]
    return values - torch.log(torch.sum(torch.exp(values), dim=-1, keepdim=True))


class AdamW(torch.optim.Optimizer):
    """AdamW one parameter after another; both averages are new tensors at every step.

    The old ones live until the next parameter's take their names.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3, *, decays_first: bool = True) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01})
        self._decays_first = decays_first

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                gradient = parameter.grad.data
                count = state.get("t", 1)
                if self._decays_first:
                    parameter.data -= group["lr"] * group["weight_decay"] * parameter.data
                old_first = state.get("m", torch.zeros_like(gradient))
                old_second = state.get("v", torch.zeros_like(gradient))
                first = beta1 * old_first + (1 - beta1) * gradient
                second = beta2 * old_second + (1 - beta2) * torch.square(gradient)
                rate = group["lr"] * math.sqrt(1 - beta2**count) / (1 - beta1**count)
                parameter.data -= rate * first / (torch.sqrt(second) + group["eps"])
                if not self._decays_first:
                    parameter.data -= group["lr"] * group["weight_decay"] * parameter.data
                state["t"], state["m"], state["v"] = count + 1, first, second
