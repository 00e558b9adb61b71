"""Traces lay out results as the operators of this machine do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit


class Unpooled(nn.Module):
    """Torch describes what `max_unpool2d` makes as contiguous; it follows its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled, places = F.max_pool2d(self.before(x), 2, return_indices=True)
        return self.after(F.max_unpool2d(pooled, places, 2).flatten(1))


class Transposed(nn.Module):
    """Torch describes the gradient of `selu` as laid out like its input; it follows the gradient that comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.across, self.along = nn.Linear(24, 24), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.along(F.selu(self.across(x.transpose(1, 2)).transpose(1, 2)))


class Normed(nn.Module):
    """Torch describes what a BatchNorm makes of a transposed input as transposed; it is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.norm(self.linear(x).transpose(1, 2))
        return torch.stack(states.unbind(2)).cumsum(0)


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model(batch).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (
            lambda: Unpooled().to(memory_format=torch.channels_last),
            lambda: torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        ),
        (Transposed, lambda: torch.randn(8, 24, 16)),
        (Normed, lambda: torch.randn(8, 24, 16)),
    ],
    ids=["max_unpool2d", "selu", "batch norm"],
)
@pytest.mark.parametrize("budget", [None, "smallest"])
def test_a_model_whose_layouts_torch_describes_otherwise_trains_as_in_eager(make, batch, budget) -> None:
    x = batch()
    torch.manual_seed(0)
    expected = gradients(make(), x)
    torch.manual_seed(0)
    fitted = memfit.fit(make(), x, budget, time_limit=0.2, remember=False, progress=False)
    assert all(map(torch.equal, gradients(fitted, x), expected))
