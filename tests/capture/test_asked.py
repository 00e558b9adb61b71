"""What a forward asks of its own tensors is answered as in eager, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.sample import Sample
from memfit.capture.trace import traced


class Own(nn.Parameter):
    """A parameter of a class of its own."""


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


class Asks(nn.Module):
    """Goes another way where a question is answered otherwise."""

    def __init__(self, question: Callable[["Asks", torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = Own(torch.full((4,), 2.0))
        self.question = question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x)) * self.scale
        return result * (3 if self.question(self, x) else 5)


def _loss(model: nn.Module, x: torch.Tensor) -> float:
    loss = model(x).square().mean()
    loss.backward()
    return float(loss.item())


def _tie(model: Asks) -> None:
    model.second.weight = model.first.weight


_ANSWERED: list[Callable[[Asks, torch.Tensor], Any]] = [
    lambda model, x: type(model.first.weight) is nn.Parameter,
    lambda model, x: type(x) is torch.Tensor and type(x * 2) is torch.Tensor,
    lambda model, x: type(type(x)) is type(torch.Tensor) and isinstance(type(x), type),
    lambda model, x: x.__class__.__name__ == "Tensor" and (x + 1).__class__ is torch.Tensor,
    lambda model, x: isinstance(model.scale, Own) and not isinstance(model.first.weight, Own),
    lambda model, x: getattr(model.first.weight, "is_expert", False),
    lambda model, x: not hasattr(model.first.weight, "is_expert_too"),
]


@pytest.mark.parametrize("question", _ANSWERED)
def test_questions_about_tensors_are_answered_as_in_eager(question: Callable[[Asks, torch.Tensor], Any]) -> None:
    model, x = Asks(question), torch.randn(3, 4)
    model.first.weight.is_expert = True  # type: ignore[attr-defined]
    assert question(model, x)
    eager = _loss(model, x)
    fitted = memfit.fit(model, x, "smallest")
    assert memfit.plan_of(fitted) is not None
    assert _loss(fitted, x) == eager
    assert "type" not in globals()


def test_an_attribute_of_a_parameter_is_looked_at_before_every_call() -> None:
    model, x = Asks(lambda model, x: getattr(model.first.weight, "is_expert", False)), torch.randn(3, 4)
    fitted = memfit.fit(model, x, "smallest")
    plain = _loss(fitted, x)
    model.first.weight.is_expert = True  # type: ignore[attr-defined]
    assert _loss(fitted, x) == pytest.approx(plain * 9 / 25)


def _marks_argument(model: Asks, x: Any) -> bool:
    x.seen = True
    return True


def _marks_weight(model: Asks, x: torch.Tensor) -> bool:
    model.first.weight.rows = len(x)  # type: ignore[attr-defined]
    return True


def _wants_gradient(model: Asks, x: torch.Tensor) -> bool:
    return x.requires_grad_().requires_grad


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (lambda model, x: model.first.weight is model.second.weight, "asks whether two objects are the same"),
        (_marks_argument, "puts the attribute 'seen'"),
        (_marks_weight, "puts the attribute 'rows'"),
        (_wants_gradient, "sets requires_grad of an argument"),
    ],
)
def test_what_a_trace_cannot_do_is_refused_by_name(question: Any, words: str) -> None:
    model, x = Asks(question), torch.randn(3, 4)
    _tie(model)
    with pytest.raises(memfit.CaptureError, match=words), traced(model, Sample((x,))):
        pass
    assert not vars(x)
    assert not x.requires_grad


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(3, 4).as_subclass(Tagged), "is a Tagged, a subclass of torch.Tensor"),
        (torch.eye(4).to_sparse(), "is sparse"),
    ],
)
def test_tensors_that_are_not_plain_are_refused_as_samples_and_left_to_eager_later(x: torch.Tensor, words: str) -> None:
    model = Asks(lambda model, x: type(x) is Tagged)
    with pytest.raises(memfit.CaptureError, match=words):
        memfit.fit(model, x, "smallest")
    eager = _loss(model, x)
    fitted = memfit.fit(model, torch.randn(4, 4), "smallest")
    with pytest.warns(UserWarning, match=words):
        assert _loss(fitted, x) == eager
