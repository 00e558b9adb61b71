"""Blocks that networks are made of: skips over levels, dense ones, shared ones, hooks, containers of results."""

import dataclasses
import random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from generated.layer import CHANNELS_FIRST, Layer, Stream, layer


def _convolution(stream: Stream, inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Module:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[stream.spatial - 1]
    return kind(inputs, outputs, kernel, padding=kernel // 2, **options)


def _batch_norm(stream: Stream, channels: int) -> nn.Module:
    if stream.shape[0] * stream.size < 2:
        return nn.GroupNorm(1, channels)
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[stream.spatial - 1](channels)


@layer("u-net")
class UNet(Layer):
    """Layers inside at half the size, and a skip over them."""

    takes = CHANNELS_FIRST

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"levels": rng.choice((1, 2)), "joined": rng.choice(("cat", "add")), "transposed": rng.random() < 0.5}

    def __init__(self, stream: Stream, levels: int, joined: str, transposed: bool) -> None:
        super().__init__(stream)
        channels, self.joined = stream.channels, joined
        while levels and stream.size % 2**levels:
            levels -= 1
        self.down = nn.ModuleList(_convolution(stream, channels, channels, stride=2) for _ in range(levels))
        transposing = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[stream.spatial - 1]
        self.up = nn.ModuleList(
            transposing(channels, channels, 2, stride=2) if transposed else nn.Upsample(scale_factor=2)
            for _ in range(levels)
        )
        width = 2 * channels if joined == "cat" else channels
        self.mix = nn.ModuleList(_convolution(stream, width, channels) for _ in range(levels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.down:
            skips.append(x)
            x = F.relu(down(x))
        for up, mix in zip(self.up, self.mix, strict=True):
            skip, x = skips.pop(), up(x)
            x = mix(torch.cat([skip, x], 1) if self.joined == "cat" else skip + x)
        return x


@layer("dense block")
class DenseBlock(Layer):
    takes = CHANNELS_FIRST

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"count": rng.choice((2, 3)), "in_place": rng.random() < 0.5}

    def __init__(self, stream: Stream, count: int, in_place: bool) -> None:
        super().__init__(stream)
        channels = stream.channels
        self.norms = nn.ModuleList(_batch_norm(stream, channels + 4 * number) for number in range(count))
        self.layers = nn.ModuleList(
            _convolution(stream, channels + 4 * number, 4, bias=False) for number in range(count)
        )
        self.active = nn.ReLU(inplace=in_place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for norm, convolve in zip(self.norms, self.layers, strict=True):
            made.append(convolve(self.active(norm(torch.cat(made, 1)))))
        return torch.cat(made, 1)


@layer("inverted residual")
class InvertedResidual(Layer):
    takes = CHANNELS_FIRST

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"active": rng.choice(("ReLU6", "Hardswish", "SiLU")), "scaled": rng.random() < 0.4}

    def __init__(self, stream: Stream, active: str, scaled: bool) -> None:
        super().__init__(stream)
        channels, wide = stream.channels, 2 * stream.channels
        self.inner = nn.Sequential(
            _convolution(stream, channels, wide, 1, bias=False),
            _batch_norm(stream, wide),
            getattr(nn, active)(inplace=True),
            _convolution(stream, wide, wide, groups=wide, bias=False),
            _batch_norm(stream, wide),
            getattr(nn, active)(inplace=True),
            _convolution(stream, wide, channels, 1, bias=False),
            _batch_norm(stream, channels),
        )
        self.gamma = nn.Parameter(torch.full((channels, *[1] * stream.spatial), 1e-2)) if scaled else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return x + (y if self.gamma is None else y * self.gamma)


@layer("shared norm")
class SharedNorm(Layer):
    """One layer several times over, with one norm for all or one for each turn."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"turns": rng.choice((2, 3, 4)), "own": rng.random() < 0.4, "in_place": rng.random() < 0.4}

    def __init__(self, stream: Stream, turns: int, own: bool, in_place: bool) -> None:
        super().__init__(stream)
        width = stream.shape[-1]
        self.turns, self.in_place = turns, in_place
        self.shared = nn.Linear(width, width)
        norm = nn.LayerNorm(width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) if own else norm for _ in range(turns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            y = F.gelu(self.shared(norm(x)))
            x = y.add_(x) if self.in_place else x + y
        return x


def _doubled(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _shifted(module: nn.Module, arguments: Any) -> Any:
    return (arguments[0] + 0.1,)


def _noted(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
    module.seen = output.detach().mean()


def _damped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def _scaled_back(module: nn.Module, to_inputs: Any, to_outputs: Any) -> Any:
    return tuple(None if each is None else each * 0.9 for each in to_inputs)


@layer("hooked")
class Hooked(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("forward", "before", "tensor", "noted", "backward"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how, self.inner = how, nn.Linear(stream.shape[-1], stream.shape[-1])
        if how == "forward":
            self.inner.register_forward_hook(_doubled)
        elif how == "before":
            self.inner.register_forward_pre_hook(_shifted)
        elif how == "noted":
            self.inner.register_forward_hook(_noted)
        elif how == "backward":
            self.inner.register_full_backward_hook(_scaled_back)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.how == "tensor" and y.requires_grad:
            y.register_hook(_damped)
        return y.tanh()


@dataclasses.dataclass
class Halves:
    left: torch.Tensor
    right: torch.Tensor | None = None
    name: str = "halves"


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


class _Packs(nn.Module):
    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(width, width)

    def forward(self, given: dict[str, Any], *, times: float = 1.0) -> Any:
        y = self.inner(given["x"]) * times
        if self.how == "dataclass":
            return Halves(y, right=None)
        if self.how == "tuple":
            return Pair(y, [given["x"], y.detach()])
        return {"y": y, "all": [y, None, (y, {"again": given["x"]})]}


@layer("packed results")
class PackedResults(Layer):
    """A module inside that is given a dict and returns a dataclass, a named tuple or a nest."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("dataclass", "tuple", "nested"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.inner = _Packs(stream.shape[-1], how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inner({"x": x, "unused": None}, times=0.5)
        if isinstance(made, Halves):
            return made.left if made.right is None else made.right
        return made.first + made.second[0] if isinstance(made, Pair) else made["y"] + made["all"][2][1]["again"]


@layer("queue")
class Queue(Layer):
    """Buffers that remember batches: a queue with a pointer, averages by code, a state that is carried on."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("queue", "codes", "state", "center", "cache", "list"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        width = stream.shape[-1]
        self.how = how
        self.register_buffer("kept", torch.randn(4, width))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("sizes", torch.ones(4), persistent=False)
        self.cache: torch.Tensor | None = None
        self.norms: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().flatten(0, -2).mean(0).to(self.kept.dtype)
        if self.how == "queue":
            y = x + self.kept.mean(0)
            self.kept.index_copy_(0, self.pointer, mean.unsqueeze(0))
            self.pointer.add_(1).remainder_(4)
            return y
        if self.how == "codes":
            return self._coded(x)
        if self.how == "state":
            state = (self.kept[0] * 0.5 + x.flatten(0, -2).mean(0).to(self.kept.dtype)).tanh()
            self.kept[0] = state.detach()
            return x + state.to(x.dtype)
        if self.how == "center":
            with torch.no_grad():
                self.kept.mul_(0.9).add_(mean, alpha=0.1)
            return x - self.kept[1]
        if self.how == "cache":
            if self.cache is None or self.cache.shape[0] != x.shape[-1]:
                self.cache = torch.linspace(0, 1, x.shape[-1])
            return x + self.cache
        self.norms = [mean.norm(), mean.abs().max()]
        return x * 0.5

    def _coded(self, x: torch.Tensor) -> torch.Tensor:
        """The nearest of some codes, gradients straight through; the codes follow."""
        rows = x.flatten(0, -2).float()
        codes = self.kept.float()
        nearest = (rows.detach().unsqueeze(1) - codes).square().sum(-1).argmin(-1)
        picked = F.embedding(nearest, codes)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 4).to(rows.dtype)
                self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.kept.lerp_(((hot.t() @ rows) / self.sizes.unsqueeze(1)).to(self.kept.dtype), 0.1)
        return (rows + (picked - rows).detach()).view(x.shape).to(x.dtype)
