"""Functions of autograd written by hand, and transforms of functions."""

import random
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from generated.layer import Layer, Stream, full_precision, layer


class _Split(torch.autograd.Function):
    """Two outputs and one without a gradient; asks which gradients are wanted."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, name: str) -> tuple[torch.Tensor, ...]:
        positive = x > 0
        ctx.save_for_backward(x, weight, positive)
        ctx.name, ctx.shape = name, x.shape
        ctx.mark_non_differentiable(positive)
        return x * weight, x.clamp(min=0), positive

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight, positive = ctx.saved_tensors
        first, second, _ = gradients
        assert ctx.name == "split"
        assert ctx.shape == x.shape
        to_weight = (first * x).sum().view_as(weight) if ctx.needs_input_grad[1] else None
        return first * weight + second * positive, to_weight, None


class _Reversed(torch.autograd.Function):
    """Nothing saved; its gradient changes sign."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.factor * gradient, None


class _Dirty(torch.autograd.Function):
    """Works in place, and saves its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2).clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * 2 * (y > 0)


class _Unmaterialized(torch.autograd.Function):
    """Says what to do where an output has no gradient; written with `setup_context`."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos() if y is None else x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, y = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> Any:
        x, y = ctx.saved_tensors
        total = torch.zeros_like(x) if first is None else first * x.cos()
        if second is not None:
            total = total + second * (-x.sin() if y is None else y)
        return total, None if y is None or second is None else second * x


class _Looked(torch.autograd.Function):
    """Keeps tensors on its context instead of saving them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = x.detach().abs().sqrt()
        return x * ctx.kept

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.kept * 1.5


@layer("handmade function")
class HandmadeFunction(Layer):
    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        hows = ("split", "reversed", "dirty", "unmaterialized", "both outputs", "one of two", "looked")
        return {"how": rng.choice(hows)}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how = how
        self.weight = nn.Parameter(torch.full((1,), 1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "split":
            one, other, positive = _Split.apply(x, self.weight, "split")
            return one + other * positive
        if self.how == "reversed":
            return _Reversed.apply(x * self.weight, 0.5)
        if self.how == "dirty":
            return _Dirty.apply(x * self.weight)
        if self.how == "both outputs":
            one, other = _Unmaterialized.apply(x, x.flip(-1) * self.weight)
            return one + other
        if self.how == "one of two":
            return _Unmaterialized.apply(x * self.weight, None)[1]
        return _Looked.apply(x) if self.how == "looked" else _Unmaterialized.apply(x, None)[0]


@layer("transformed function")
class TransformedFunction(Layer):
    """`torch.func` inside of a forward: an ensemble in one call, a gradient that is differentiated again."""

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(("vmap", "functional call", "vjp", "grad", "autograd grad"))}

    def __init__(self, stream: Stream, how: str) -> None:
        super().__init__(stream)
        self.how = how
        self.inner = nn.Linear(stream.shape[-1], stream.shape[-1])
        self.many = nn.Parameter(torch.randn(3, stream.shape[-1]) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "vmap":
            return torch.func.vmap(lambda scale: (x * scale.to(x.dtype)).tanh())(self.many).mean(0)
        if self.how == "functional call":
            weights = {name: each * 0.5 for name, each in self.inner.named_parameters()}
            return torch.func.functional_call(self.inner, weights, (x,))
        if self.how == "vjp":
            y, pull = torch.func.vjp(torch.tanh, x)
            return y + pull(torch.ones_like(y))[0]
        if self.how == "grad":
            return x + torch.func.grad(lambda each: full_precision(each).pow(3).sum())(x).to(x.dtype)
        with torch.enable_grad():
            inside = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((inside.tanh() * inside).sum(), inside, create_graph=True)
        return x + 0.1 * slope
