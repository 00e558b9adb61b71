"""Sizes of results that depend on the storage of an argument, not on its shape."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit
from memfit.measure.peak import measure_peak

ROWS, WIDTH = 256, 64


class Model(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.function(self.inner(x))
        return x.square().mean()


def copied_row(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[0] = x[1].clone()
    return x.tanh()


def folded(x: torch.Tensor) -> torch.Tensor:
    images = x.view(4, 16, 16, 16)
    folds = torch.nn.functional.unfold(images, 2)
    return torch.nn.functional.fold(folds, (16, 16), 2).reshape(ROWS, WIDTH).add_(1).tanh()


@pytest.mark.parametrize("function", [copied_row, folded])
def test_a_plan_takes_no_more_than_it_says(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, batch = Model(function), torch.randn(ROWS, WIDTH)
    memfit.fit(model, batch, "smallest", time_limit=0.2, remember=False, progress=False, allow=("recompute",))

    def step() -> None:
        model(batch).backward()

    step()
    model.zero_grad(set_to_none=True)
    measured = measure_peak(step, resident=[model, batch]).peak_bytes
    plan = memfit.plan_of(model)
    assert plan is not None
    assert measured <= 1.001 * plan.peak_bytes
