"""Activations, norms, dropouts and plain arithmetic, for every domain."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from generated.layer import EVERY, Layer, Stream, divisor, layer


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.neg()], -1)


ACTIVATIONS = {
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "LeakyReLU": nn.LeakyReLU,
    "RReLU": nn.RReLU,
    "ELU": nn.ELU,
    "SELU": nn.SELU,
    "CELU": nn.CELU,
    "SiLU": nn.SiLU,
    "Mish": nn.Mish,
    "Hardtanh": nn.Hardtanh,
    "Hardswish": nn.Hardswish,
    "Hardsigmoid": nn.Hardsigmoid,
}  # these may work in place
SMOOTH = {
    "GELU": nn.GELU,
    "Softplus": nn.Softplus,
    "Softsign": nn.Softsign,
    "Tanh": nn.Tanh,
    "Tanhshrink": nn.Tanhshrink,
    "Sigmoid": nn.Sigmoid,
    "LogSigmoid": nn.LogSigmoid,
    "Hardshrink": nn.Hardshrink,
    "Softshrink": nn.Softshrink,
    "Threshold": lambda: nn.Threshold(0.2, 0.1),
    "GLU": lambda: nn.Sequential(_Doubled(), nn.GLU(-1)),
    "tanh GELU": lambda: nn.GELU(approximate="tanh"),
    "narrow Hardtanh": lambda: nn.Hardtanh(-0.3, 0.7),
    "steep Softplus": lambda: nn.Softplus(beta=5.0, threshold=2.0),
    "Softmin": lambda: nn.Softmin(dim=-1),
    "LogSoftmax": lambda: nn.LogSoftmax(dim=1),
    "small LeakyReLU": lambda: nn.LeakyReLU(0.0),
    "steep LeakyReLU": lambda: nn.LeakyReLU(-0.5),
    "wide ELU": lambda: nn.ELU(alpha=2.5),
    "wide CELU": lambda: nn.CELU(alpha=0.3),
}


@layer("activation")
class Activation(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"name": rng.choice([*ACTIVATIONS, *SMOOTH]), "in_place": rng.random() < 0.5}

    def __init__(self, stream: Stream, name: str, in_place: bool) -> None:
        super().__init__(stream)
        self.active = ACTIVATIONS[name](inplace=in_place) if name in ACTIVATIONS else SMOOTH[name]()
        self.in_place = in_place and name in ACTIVATIONS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.active(x * 1 if self.in_place else x)  # what comes in may be the batch


@layer("relu")
class Rectified(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("module", "function", "in place", "clamp", "threshold", "tanh GELU", "where"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            return (x + 0.1).relu_()
        if self.how == "clamp":
            return x.clamp(-0.5, 0.5)
        if self.how == "threshold":
            return F.threshold(x, 0.1, -0.2)
        if self.how == "tanh GELU":
            return F.gelu(x, approximate="tanh")
        return torch.where(x > 0, x, x * 0.2) if self.how == "where" else F.relu(x)


@layer("learned activation")
class LearnedActivation(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"shared": rng.random() < 0.5}

    def __init__(self, stream: Stream, shared: bool) -> None:
        super().__init__(stream)
        self.axis = stream.channel_axis
        self.active = nn.PReLU(1 if shared else stream.channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.active(x.transpose(1, self.axis)).transpose(1, self.axis)


@layer("softmax")
class Softmax(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("softmax", "log_softmax", "softmin", "gumbel_softmax"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how, self.axis = how, stream.channel_axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(F, self.how)(x, dim=self.axis)


@layer("gated")
class Gated(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("glu", "chunk", "split", "unbind"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how, self.axis = how, stream.channel_axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, x.flip(self.axis)], self.axis)
        if self.how == "glu":
            return F.glu(x, self.axis)
        if self.how == "unbind":
            one, other = x.unflatten(self.axis, (2, -1)).unbind(self.axis)
        elif self.how == "split":
            one, other = x.split(x.shape[self.axis] // 2, self.axis)
        else:
            one, other = x.chunk(2, self.axis)
        return one * F.silu(other)


class _GroupNorm(nn.GroupNorm):
    """One whose backward does not end the process: torch 2.13's does, of a channels last input without a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.requires_grad else x.contiguous())


@layer("norm")
class Norm(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "kind": rng.choice(("batch", "batch", "instance", "group", "layer", "rms", "local", "unit")),
            "affine": rng.random() < 0.8,
            "tracks": rng.random() < 0.8,
            "momentum": rng.choice((0.1, 0.01, None)),
        }

    def __init__(self, stream: Stream, kind: str, affine: bool, tracks: bool, momentum: float | None) -> None:
        super().__init__(stream)
        channels, spatial = stream.channels, stream.spatial
        self.axis, self.last = stream.channel_axis, kind in ("layer", "rms")
        if kind == "batch" and stream.shape[0] * stream.size < 2:
            kind = "group"
        if kind == "instance" and (spatial == 0 or stream.size < 2):
            kind = "unit"
        place = max(0, spatial - 1)
        self.inner: nn.Module | None = None
        if kind == "batch":
            batch = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[place]
            self.inner = batch(channels, affine=affine, track_running_stats=tracks, momentum=momentum)
        elif kind == "instance":
            instance = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[place]
            self.inner = instance(channels, affine=affine, track_running_stats=tracks)
        elif kind == "group":
            self.inner = _GroupNorm(divisor(channels, 4), channels, affine=affine)
        elif kind == "layer":
            self.inner = nn.LayerNorm(channels, elementwise_affine=affine)
        elif kind == "rms":
            self.inner = nn.RMSNorm(channels, elementwise_affine=affine)
        elif kind == "local" and spatial:
            self.inner = nn.LocalResponseNorm(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner is None:
            return F.normalize(x, dim=self.axis)
        axis = -1 if self.last else 1
        return self.inner(x.transpose(axis, self.axis)).transpose(axis, self.axis)


@layer("dropout")
class Dropout(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "kind": rng.choice(("plain", "plain", "channels", "alpha", "feature alpha", "by hand", "depth")),
            "rate": rng.choice((0.1, 0.3, 0.5, 0.0)),
            "in_place": rng.random() < 0.3,
        }

    def __init__(self, stream: Stream, kind: str, rate: float, in_place: bool) -> None:
        super().__init__(stream)
        self.kind, self.rate, self.in_place, self.spatial = kind, rate, in_place, stream.spatial

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.5 if self.in_place else x
        if self.kind == "by hand":
            return x * (torch.rand_like(x) >= self.rate) / (1 - self.rate)
        if self.kind == "depth":
            noise = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(1 - self.rate)
            return x * noise
        names = {"alpha": "alpha_dropout", "feature alpha": "feature_alpha_dropout"}
        channels = ("dropout", "dropout1d", "dropout2d", "dropout3d")[self.spatial]
        name = channels if self.kind == "channels" else names.get(self.kind, "dropout")
        return getattr(F, name)(x, self.rate, self.training, self.in_place)


@layer("linear")
class Linear(Layer):
    takes = ("rows", "sequence")

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "width": rng.choice((4, 8, 16, 24)),
            "bias": rng.random() < 0.7,
            "how": rng.choice(("plain", "plain", "plain", "weight norm", "spectral norm", "orthogonal", "low rank")),
        }

    def __init__(self, stream: Stream, width: int, bias: bool, how: str) -> None:
        super().__init__(stream)
        inner = nn.Linear(stream.channels, width, bias=bias)
        if how == "weight norm":
            inner = parametrizations.weight_norm(inner)
        elif how == "spectral norm":
            inner = parametrizations.spectral_norm(inner)
        self.inner = inner
        self.down = nn.Linear(stream.channels, 2, bias=False) if how == "low rank" else None
        self.up = nn.Linear(2, width, bias=False) if how == "low rank" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y if self.down is None or self.up is None else y + self.up(self.down(x)) * 0.5


@layer("arithmetic")
class Arithmetic(Layer):
    takes = EVERY

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(sorted(_ARITHMETIC))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.run = _ARITHMETIC[how]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


_ARITHMETIC = {
    "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x.sigmoid(), value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.square() + 1, value=0.5),
    "square": lambda x: x.square() * 0.1 + x,
    "pow": lambda x: (x.abs() + 0.1).pow(1.5),
    "exp and log": lambda x: (x.clamp(max=3).exp() + 1).log(),
    "sqrt": lambda x: (x.square() + 0.01).sqrt(),
    "rsqrt": lambda x: x * (x.square() + 0.1).rsqrt(),
    "sin": lambda x: x.sin() + x.cos(),
    "atan2": lambda x: torch.atan2(x, x.square() + 1),
    "erf": lambda x: torch.erf(x),
    "maximum": lambda x: torch.maximum(x, -0.5 * x),
    "hypot": lambda x: torch.hypot(x, x.detach() + 1),
    "remainder": lambda x: x - x.detach().floor(),
    "nan_to_num": lambda x: torch.nan_to_num(x) + x,
    "xlogy": lambda x: torch.xlogy(x.square() + 0.1, x.square() + 0.1),
    "logaddexp": lambda x: torch.logaddexp(x, -x) if x.dtype != torch.bfloat16 else x,
    "var_mean": lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 0.1),
    "std": lambda x: x / (x.std(dim=-1, unbiased=False, keepdim=True) + 0.5),
    "norm": lambda x: x / (x.flatten(1).norm(dim=1).view(-1, *[1] * (x.dim() - 1)) + 1),
    "amax": lambda x: x - x.amax(-1, keepdim=True),
    "aminmax": lambda x: x * (x.detach().aminmax().max - x.detach().aminmax().min).clamp(max=2),
    "float": lambda x: (x.float() * 0.7).to(x.dtype),
    "double": lambda x: (x.double().tanh()).to(x.dtype),
    "half": lambda x: x + x.bfloat16().to(x.dtype),
    "scalars": lambda x: (2 - x) / 3 + 1.0 / (x.abs() + 1),
    "logaddexp2": lambda x: torch.logaddexp2(x, -x) if x.dtype != torch.bfloat16 else x,
    "softmax of float": lambda x: x.softmax(-1, dtype=torch.float32).to(x.dtype) * x,
    "floor divide": lambda x: x + torch.div(x.detach(), 0.5, rounding_mode="floor"),
    "abs": lambda x: x.abs() + x.neg().sigmoid().mul(x),
    "cond on shape": lambda x: x * 2 if x.shape[0] % 2 else x.tanh(),
    "loop": lambda x: sum((x * (0.5**each) for each in range(4)), x),
    "reductions": lambda x: x / (1 + x.abs().sum()) + x.mean() * x.max() - x.min(),
    "var": lambda x: x * torch.var(x, dim=0, unbiased=False, keepdim=True).add(0.1).log(),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.2], dtype=x.dtype)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-3),
    "glu of self": lambda x: F.glu(torch.cat([x, x], -1), -1),
    "standardized": lambda x: (x - x.mean()).div(x.std(unbiased=False) + 0.1),
    "clamp": lambda x: x.clamp(min=-0.3).clamp_max(0.8),
    "uneven": lambda x: x.where(x > 0, x.new_tensor(0.1)) * x.new_full((1,), 0.5),
    "zero sized": lambda x: torch.cat([x[:0], x], 0) + x[:0].sum(),
    "unused": lambda x: (x.exp().sum(), x * 0.5)[1],
    "twice used": lambda x: (lambda y: y * y.sigmoid() + y)(x * 0.5),
    "mixed": lambda x: x * torch.arange(x.shape[-1], dtype=x.dtype) / 8,
}
