"""Sums over several calls of what each call uses several times are said to be others."""

import warnings

import pytest
import torch
from torch import nn

import memfit

pytestmark = pytest.mark.usefixtures("one_thread")


class Twice(nn.Module):
    """Uses a layer twice, or two that have one weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8) if tied else self.first
        if tied:
            self.second.weight = self.first.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(batch)))
        return result


@pytest.mark.parametrize("tied", [False, True])
def test_two_calls_in_one_backward_pass_are_said_once(tied: bool) -> None:
    batch = torch.randn(4, 8)
    model = memfit.fit(Twice(tied=tied), batch, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(batch).sum().backward()
    with pytest.warns(UserWarning, match=r"each uses (first|second).weight several times"):
        (model(batch).sum() + model(batch).mean()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (model(batch).sum() + model(batch).mean()).backward()


def test_a_layer_that_each_call_uses_once_is_no_matter() -> None:
    batch = torch.randn(4, 8)
    model = memfit.fit(nn.Linear(8, 8), batch, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (model(batch).sum() + model(batch).mean()).backward()
