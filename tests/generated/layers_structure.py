"""Layers that hold layers, and what models do beside computing: buffers, custom functions, checkpoints, questions."""

import random
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from generated.layer import Layer, Stream, layer


class Holder(Layer):
    """Runs the layers inside; the base of those that do more."""

    holds_layers = True

    def __init__(self, stream: Stream, inner: nn.Module) -> None:
        super().__init__(stream)
        self.inner = inner


def alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape


@layer("residual")
class Residual(Holder):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("add", "add", "in place", "scaled", "concatenated"))}

    def __init__(self, stream: Stream, inner: nn.Module, how: str) -> None:
        super().__init__(stream, inner)
        self.how, self.axis = how, stream.channel_axis
        self.scale = nn.Parameter(torch.full((), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if not alike(x, y):
            return y
        if self.how == "in place":
            return (y * 1.0).add_(x)
        if self.how == "scaled":
            return x + self.scale * y
        return torch.cat([x, y], self.axis) if self.how == "concatenated" else x + y


@layer("twice")
class Twice(Holder):
    """The same layers twice, one behind the other where shapes allow, else beside each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return self.inner(y) if alike(x, y) else y + self.inner(x * 0.5)


@layer("branches")
class Branches(Holder):
    """The layers inside beside other ways, and how these come together."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {
            "how": rng.choice(("max", "gate", "detached", "stacked", "highway", "kept", "mean of passes", "skipped"))
        }

    def __init__(self, stream: Stream, inner: nn.Module, how: str) -> None:
        super().__init__(stream, inner)
        self.how = how
        self.gate = nn.Linear(stream.shape[-1], stream.shape[-1])
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.how == "mean of passes":
            return torch.stack([y, self.inner(x), self.inner(x)]).mean(0)
        if self.how == "detached":
            return y + self.inner(x.detach())
        if self.how == "kept":
            self.kept = y.detach().float().mean()
            return y * (1 + self.kept.to(y.dtype))
        if not alike(x, y):
            return y
        if self.how == "max":
            return torch.maximum(x, y)
        if self.how == "stacked":
            return torch.stack([x, y], 0).softmax(0).mul(torch.stack([y, x])).sum(0)
        if self.how == "skipped":  # by a draw
            keep = (torch.rand(x.shape[0], *[1] * (x.dim() - 1)) < 0.7).to(x.dtype)
            return x + keep * y
        gate = self.gate(x).sigmoid()
        return gate * y + (1 - gate) * x if self.how == "highway" else x * gate + y


@layer("checkpoint")
class Checkpointed(Holder):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"reentrant": rng.random() < 0.2, "segments": rng.random() < 0.3, "keeps_state": rng.random() < 0.8}

    def __init__(
        self,
        stream: Stream,
        inner: nn.Module,
        reentrant: bool,
        segments: bool = False,
        keeps_state: bool = True,
    ) -> None:
        super().__init__(stream, inner)
        self.reentrant, self.segments, self.keeps_state = reentrant, segments, keeps_state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.segments:
            return checkpoint_sequential(self.inner, 2, x, use_reentrant=self.reentrant)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant, preserve_rng_state=self.keeps_state)


@layer("frozen")
class Frozen(Holder):
    def __init__(self, stream: Stream, inner: nn.Module) -> None:
        super().__init__(stream, inner)
        inner.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@layer("half frozen")
class HalfFrozen(Holder):
    def __init__(self, stream: Stream, inner: nn.Module) -> None:
        super().__init__(stream, inner)
        for parameter in list(inner.parameters())[::2]:
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@layer("no gradient")
class NoGradient(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.inner(x)
        return x + y if alike(x, y) else x * y.mean()


@layer("in 16 bits")
class In16Bits(Holder):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"half": rng.random() < 0.2, "caches": rng.random() < 0.8}

    def __init__(self, stream: Stream, inner: nn.Module, half: bool = False, caches: bool = True) -> None:
        super().__init__(stream, inner)
        self.dtype, self.caches = torch.float16 if half else torch.bfloat16, caches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype, cache_enabled=self.caches):
            y = self.inner(x)
        return y.to(x.dtype)


@layer("counted")
class Counted(Layer):
    """Writes into buffers, in place and by putting others there."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"replaces": rng.random() < 0.4, "reads": rng.random() < 0.6}

    def __init__(self, stream: Stream, replaces: bool, reads: bool) -> None:
        super().__init__(stream)
        self.replaces, self.reads = replaces, reads
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean().to(self.average.dtype)
        if self.training:
            self.calls += 1
            if self.replaces:
                self.average = 0.9 * self.average + 0.1 * mean
            else:
                self.average.lerp_(mean, 0.1)
        return x - self.average.to(x.dtype) if self.reads else x + 0


class _Swish(torch.autograd.Function):
    """Saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.beta = beta
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(ctx.beta * x)
        return gradient * (gate + ctx.beta * x * gate * (1 - gate)), None


class _Rounded(torch.autograd.Function):
    """Rounds, and lets gradients through where values are small."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.abs() < 2)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (small,) = ctx.saved_tensors
        return gradient * small


@layer("custom function")
class CustomFunction(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("swish", "rounded", "straight through"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "swish":
            return _Swish.apply(x, 1.5)
        return _Rounded.apply(x) if self.how == "rounded" else x + (x.round() - x).detach()


@layer("noise")
class Noise(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        hows = ("randn", "rand", "normal_", "randint", "randperm", "bernoulli", "multinomial")
        return {"how": rng.choice((*hows, "normal", "poisson", "exponential", "binomial", "generator", "rand scalar"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "randperm":
            return x[torch.randperm(x.shape[0])]
        if self.how == "multinomial":
            return x[torch.multinomial(torch.ones(x.shape[0]), 1)] + x
        if self.how == "normal_":
            return x + torch.empty_like(x).normal_(0, 0.1)
        if self.how == "bernoulli":
            return x * torch.bernoulli(torch.full_like(x, 0.7))
        if self.how == "normal":
            return torch.normal(x.detach(), 0.1) + x
        if self.how == "poisson":
            return x * torch.poisson(torch.full_like(x, 0.7))
        if self.how == "exponential":
            return x + torch.empty_like(x).exponential_(5.0) + torch.empty_like(x).geometric_(0.5)
        if self.how == "binomial":
            return x * torch.binomial(torch.full_like(x, 3.0), torch.full_like(x, 0.3))
        if self.how == "generator":
            generator = torch.Generator().manual_seed(3)
            return x + torch.randn(x.shape, generator=generator).to(x.dtype)
        if self.how == "rand scalar":
            return x * torch.rand(())
        if self.how == "randint":
            return x + torch.randint(3, x.shape)
        return x + (torch.randn_like(x) if self.how == "randn" else torch.rand(x.shape, dtype=x.dtype)) * 0.1


@layer("odd parameters")
class OddParameters(Layer):
    """Parameters of no elements, of one, never used, and used as they are."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(3))
        self.single = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(stream.shape[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.single + self.shift + self.empty.sum()


@layer("question")
class Question(Layer):
    """Asks for a value, so that the model cannot be captured whole."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("mean", "mean", "float", "bool", "nonzero", "numpy", "list", "unused"))}

    def __init__(self, stream: Stream, how: str = "mean") -> None:
        super().__init__(stream)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.detach().abs().mean()
        if self.how == "float":
            return x * min(1.0, float(size))
        if self.how == "bool":
            return x if bool((x.detach() > 0).any()) else x * 2
        if self.how == "nonzero":
            rows = x.flatten(0, -2)
            picked = rows[rows.detach().sum(-1) > 0]
            return x + picked.sum() / 8
        if self.how == "numpy":
            return x * float(x.detach().float().numpy().max().clip(0.5, 1.5))
        if self.how == "list":
            return x + sum(x.detach().flatten()[:3].tolist())
        if self.how == "unused":
            self.seen = size.item()
            return x * 1.5
        return x * 0.5 if size.item() > 0.1 else x + 1
