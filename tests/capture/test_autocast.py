"""A captured step under autocast rounds as the eager one: its backward pass runs outside."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.errors import CaptureError


class Attention(nn.Module):
    """With dropout its backward is made of operators that autocast would cast."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.projection(x).unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(-3, -2)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.2)


def test_a_backward_pass_outside_autocast_is_captured_so() -> None:
    model, x = Attention(), torch.randn(4, 12, 16)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    eager = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        plan = memfit.plan(model, (x,), budget=1.0)
        assert memfit.check(model, plan, (x,)).exact
        memfit.fit(model, (x,))
    captured = gradients()
    assert all(torch.equal(one, other) for one, other in zip(eager, captured, strict=True))


class Twice(nn.Module):
    """Uses a parameter twice, in an autocast block of its own if there is none around it."""

    def __init__(self, block: bool) -> None:
        super().__init__()
        self.deep = nn.Conv1d(8, 8, 3, padding=1)
        self.block = torch.autocast("cpu", torch.bfloat16) if block else contextlib.nullcontext()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.block:
            return (self.deep(x) + self.deep(x * 0.5)).float().square().mean()


@pytest.mark.parametrize("block", [False, True])
def test_a_parameter_that_is_cast_once_for_two_uses_is_not_captured_whole(block: bool) -> None:
    """Whatever operators run: most of them are called below autocast, where it looks switched off."""
    around = contextlib.nullcontext() if block else torch.autocast("cpu", torch.bfloat16)
    with around, traced(Twice(block), Sample.of(torch.randn(2, 8, 16))) as joint:
        assert set(joint.cast_anew) == {"deep.weight", "deep.bias"}


class Products(nn.Module):
    """Its operator casts inside, in a block of the model's own or in one around it."""

    def __init__(self, block: bool) -> None:
        super().__init__()
        self.products = nn.Bilinear(8, 8, 4)
        self.block = torch.autocast("cpu", torch.bfloat16) if block else contextlib.nullcontext()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.block:
            return self.products(x, x.flip(-1)).float().square().mean()


@pytest.mark.parametrize("block", [False, True])
def test_an_operator_that_casts_inside_is_refused_wherever_the_block_is(block: bool) -> None:
    around = contextlib.nullcontext() if block else torch.autocast("cpu", torch.bfloat16)
    with (
        around,
        pytest.raises(CaptureError, match="casts inside"),
        traced(Products(block), Sample.of(torch.randn(2, 8))),
    ):
        pass


class Turns(nn.Module):
    """One layer several times, with nothing between that autocast does not know."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.inside = nn.LayerNorm(8), nn.Linear(8, 8), inside

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.inside else contextlib.nullcontext():
            for _ in range(3):
                batch = F.gelu(self.linear(self.norm(batch)))
        return batch


@pytest.mark.parametrize("inside", [False, True])
def test_a_weight_that_is_cast_anew_is_seen_where_autocast_knows_every_operator(inside: bool) -> None:
    outside = contextlib.nullcontext() if inside else torch.autocast("cpu", torch.bfloat16)
    with outside, traced(Turns(inside), Sample((torch.randn(2, 4, 8),))) as joint:
        assert joint.cast_anew == ("linear.bias", "linear.weight")
    with traced(Turns(False), Sample((torch.randn(2, 4, 8),))) as joint:
        assert not joint.cast_anew
