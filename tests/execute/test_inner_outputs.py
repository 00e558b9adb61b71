"""What a captured call cannot give is refused by name: gradients of inner outputs, and batches of gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit


class Feature(nn.Module):
    """Returns a feature beside scores, and leaves another on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        feature = torch.tanh(self.first(batch))
        self.kept = feature.sin()
        return self.second(self.kept), feature


@pytest.fixture
def fitted() -> nn.Module:
    return memfit.fit(Feature(), torch.randn(4, 8), progress=False)


ASKED: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], object]] = {
    "a feature": lambda _, scores, feature: torch.autograd.grad(scores.sum() + feature.sum(), feature),
    "a feature that only the scores use": lambda _, scores, feature: torch.autograd.grad(scores.sum(), feature),
    "what was left on the model": lambda model, scores, _: torch.autograd.grad(scores.sum(), model.kept),
    "a feature, from what was left": lambda model, _, feature: torch.autograd.grad(model.kept.sum(), feature),
    "a feature, by backward": lambda _, scores, feature: scores.sum().backward(inputs=[feature]),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_the_gradient_of_an_output_behind_which_others_are_is_refused(fitted: nn.Module, ask) -> None:
    with pytest.raises(memfit.ExecutionError, match="from which other outputs are computed"):
        ask(fitted, *fitted(torch.randn(4, 8)))


def test_everything_else_is_as_in_eager(fitted: nn.Module) -> None:
    batch = torch.randn(4, 8)
    found = []
    for model in (fitted, memfit.remove):
        model = fitted if model is fitted else memfit.remove(fitted)
        scores, feature = model(batch)
        scores.mul_(2)
        loss = scores.square().mean() + feature.mean() + model.kept.sum()
        found.append(torch.autograd.grad(loss, [*model.parameters()]))
    assert all(map(torch.equal, *found))


def test_a_batch_of_gradients_is_refused(fitted: nn.Module) -> None:
    scores, _ = fitted(torch.randn(4, 8))
    with pytest.raises(memfit.ExecutionError, match="is_grads_batched"):
        torch.autograd.grad(scores, fitted.second.weight, torch.ones(3, 4, 4), is_grads_batched=True)


def test_nobody_holds_parameters_so_that_they_cannot_be_swapped(fitted: nn.Module) -> None:
    other = nn.Parameter(torch.zeros(8, 8))
    torch.utils.swap_tensors(fitted.first.weight, other)
    assert not fitted.first.weight.any()
