"""Weights that are computed, shared, masked, kept in containers, or complex."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from generated.layer import CHANNELS_FIRST, Layer, Stream, full_precision, layer


class _Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@layer("computed weight")
class ComputedWeight(Layer):
    """A square linear layer along the last axis, whose weight is made anew in every call."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        hows = ("weight norm hook", "spectral norm hook", "weight norm", "spectral norm", "symmetric", "orthogonal")
        return {"how": rng.choice((*hows, "pruned", "masked", "transposed", "sliced", "low rank", "quantized"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        width = stream.shape[-1]
        self.how, self.inner = how, nn.Linear(width, width)
        self.down = nn.Parameter(torch.randn(2, width) * 0.3)
        self.register_buffer("mask", torch.ones(width, width).tril())
        if how == "weight norm hook":
            self.inner = nn.utils.weight_norm(self.inner)
        elif how == "spectral norm hook":
            self.inner = nn.utils.spectral_norm(self.inner)
        elif how == "weight norm":
            parametrizations.weight_norm(self.inner, dim=1)
        elif how == "spectral norm":
            parametrizations.spectral_norm(self.inner, n_power_iterations=2)
        elif how == "symmetric":
            parametrize.register_parametrization(self.inner, "weight", _Symmetric())
        elif how == "orthogonal":
            parametrizations.orthogonal(self.inner, orthogonal_map="householder")
        elif how == "pruned":
            prune.l1_unstructured(self.inner, "weight", amount=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        if self.how == "masked":
            return F.linear(x, weight * self.mask, self.inner.bias)
        if self.how == "transposed":
            return F.linear(self.inner(x).tanh(), weight.t())
        if self.how == "sliced":
            half = max(1, weight.shape[0] // 2)
            return torch.cat([F.linear(x, weight[:half]), F.linear(x, weight[half:])], -1)
        if self.how == "low rank":
            return F.linear(x, self.down.t() @ self.down)
        if self.how == "quantized":
            return F.linear(x, weight + ((weight * 8).round() / 8 - weight).detach())
        return self.inner(x)


@layer("computed kernel")
class ComputedKernel(Layer):
    """A convolution by a weight that is standardized, made from the batch, normed, or given by name for its padding."""

    takes = CHANNELS_FIRST

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("standardized", "dynamic", "normed", "same", "valid", "blurred"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how, channels = how, stream.channels
        self.convolve = (F.conv1d, F.conv2d, F.conv3d)[stream.spatial - 1]
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[stream.spatial - 1]
        padding: Any = "same" if how == "same" else "valid" if how == "valid" and stream.size > 2 else 1
        dilation = 2 if how == "same" else 1
        self.inner = kind(channels, channels, 3, padding=padding, dilation=dilation)
        if how == "normed":
            parametrizations.weight_norm(self.inner)
        self.make = nn.Linear(channels, channels)
        axes = [3] * stream.spatial
        self.register_buffer("blur", torch.ones(channels, 1, *axes) / 3**stream.spatial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        if self.how == "standardized":
            flat = weight.flatten(1)
            flat = (flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 0.01)
            return self.convolve(x, flat.view_as(weight), self.inner.bias, padding=1)
        if self.how == "dynamic":  # another kernel for every sample, by groups
            batch, channels = x.shape[:2]
            scales = self.make(x.flatten(2).mean(2)).view(batch, channels, *[1] * (weight.dim() - 1))
            weights = (weight.unsqueeze(0) * scales).flatten(0, 1)
            y = self.convolve(x.reshape(1, -1, *x.shape[2:]), weights.to(x.dtype), padding=1, groups=batch)
            return y.view(batch, channels, *y.shape[2:])
        if self.how == "blurred":
            return self.convolve(self.inner(x), self.blur, padding=1, groups=x.shape[1])
        return self.inner(x)


@layer("contained parameters")
class ContainedParameters(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("list", "dict", "module dict", "same twice", "stacked", "chosen"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        width = stream.shape[-1]
        self.how = how
        self.some = nn.ParameterList([nn.Parameter(torch.randn(width) * 0.5) for _ in range(3)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(width)), "scale": torch.ones(width)})
        self.layers = nn.ModuleDict({"one": nn.Linear(width, width), "other": nn.LayerNorm(width)})
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "list":
            return sum((x * scale for scale in self.some), torch.zeros_like(x))
        if self.how == "dict":
            return x * self.named["scale"] + self.named["shift"]
        if self.how == "module dict":
            for each in self.layers.values():
                x = each(x)
            return x
        if self.how == "same twice":
            return x * self.some[0] + self.some[0]
        if self.how == "stacked":
            return (x.unsqueeze(-2) * torch.stack(list(self.some))).sum(-2)
        return x * self.some[x.shape[0] % 3]


@layer("complex weight")
class ComplexWeight(Layer):
    """A product with a complex parameter, in frequencies or of the values as they are."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("spectrum", "product", "matrix", "polar", "viewed"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how, width = how, stream.shape[-1]
        length = width // 2 + 1 if how == "spectrum" else width
        shape = (width, width) if how == "matrix" else (length,)
        self.pairs = nn.Parameter(torch.randn(*shape, 2) * 0.3)
        self.weight = None if how == "viewed" else nn.Parameter(torch.randn(shape, dtype=torch.complex64) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self._product(full_precision(x)).to(x.dtype)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.view_as_complex(self.pairs.to(x.dtype)) if self.weight is None else self.weight
        weight = weight if weight.is_complex() else torch.complex(weight.to(x.dtype), x.detach().mean())
        if self.how == "spectrum":
            return torch.fft.irfft(torch.fft.rfft(x, norm="ortho") * weight, n=x.shape[-1], norm="ortho")
        if self.how == "matrix":
            return (x.to(weight.dtype) @ weight).real
        product = x * weight
        return product.abs() + product.angle() * 0.1 if self.how == "polar" else product.real + product.imag
