"""Numbers that captured calls take anew."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit

BATCH = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
SCALE = {"global": 1.0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.weight, self.temperature = 0.1, 1.0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.first(batch))
        return F.mse_loss(self.second(hidden), batch) + self.penalty(hidden)

    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Weighted(Net):
    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden.square().mean()


class Mixed(Net):
    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        mean = hidden.mean()
        return (
            mean * (1 - self.weight) + (self.weight**2 / 3) * mean.square() - self.weight + 2.0 / (mean + self.weight)
        )


class ByTemperature(Net):
    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden / self.temperature).logsumexp(1).mean().mul(self.weight)


class InPlace(Net):
    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        scaled = hidden * 2
        scaled *= self.weight
        scaled += -self.weight
        return scaled.square().mean()


class Branches(Net):
    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean() * self.weight if self.weight < 0.25 else hidden.square().mean()


class Rounds(Net):
    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, : 1 + int(self.weight * 20)].mean()


class Drops(Net):
    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(hidden, self.weight).mean()


class Keeps(Net):
    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        self.twice = self.weight * 2
        return hidden.mean() * self.twice


class Swallows(Net):
    """Asks, and catches what is raised."""

    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        try:
            factor = float(self.weight) * 2
        except ValueError:
            factor = 3.0
        return hidden.mean() * factor


class Writes(Net):
    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean() * (2.0 if f"{self.weight:.3f}".endswith("5") else 1.0)


class ByNumPy(Net):
    def penalty(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean() * float(np.float32(3.1) * self.weight)


class Splits(Net):
    """Returns views of one result."""

    def forward(self, batch: torch.Tensor) -> Any:
        made = self.second(torch.sigmoid(self.first(batch)) * self.weight)
        return made[:, :4], made[:, 4:]


def of_parts(model: Any, number: int) -> torch.Tensor:
    model.weight = number / 40
    first, second = model(BATCH)
    model.weight += 0.01
    third, fourth = model(BATCH + 1)
    loss: torch.Tensor = first.square().mean() + fourth.square().mean() + third.mean()
    return loss + second.mean() if number % 2 else loss


def usual(model: Any, number: int) -> torch.Tensor:
    model.weight, model.temperature = number / 40, 1 + number / 7
    loss: torch.Tensor = model(BATCH)
    return loss


def two_forwards(model: Any, number: int) -> torch.Tensor:
    first = usual(model, number)
    second: torch.Tensor = usual(model, number + 3)
    return first + second


def trained(make: Callable[[], nn.Module], step: Any, *, fitted: bool) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = make()
    if fitted:
        memfit.fit(model, BATCH, "64KiB", time_limit=1, progress=False)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for number in range(6):
        loss = step(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, *model.parameters()], memfit.captures_of(model).count if fitted else 0


@pytest.mark.parametrize("step", [usual, two_forwards])
@pytest.mark.parametrize("make", [Weighted, Mixed, ByTemperature, InPlace])
def test_numbers_that_change_in_every_step_are_captured_a_few_times(make: Any, step: Any) -> None:
    plain, _ = trained(make, step, fitted=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody is told to hold it in a buffer
        found, captures = trained(make, step, fitted=True)
    assert found[0] == plain[0]
    assert all(torch.equal(*pair) for pair in zip(found[1:], plain[1:], strict=True))
    assert captures <= 4


@pytest.mark.filterwarnings("ignore:.*captured 3 times more")
@pytest.mark.parametrize("make", [Branches, Rounds, Drops, Keeps, Swallows, Writes, ByNumPy])
def test_a_number_that_decides_something_is_captured_anew(make: Any) -> None:
    plain, _ = trained(make, usual, fitted=False)
    found, captures = trained(make, usual, fitted=True)
    assert found[0] == plain[0]
    assert all(torch.equal(*pair) for pair in zip(found[1:], plain[1:], strict=True))
    assert captures > 3


def test_outputs_that_are_views_find_the_numbers_of_their_forward() -> None:
    plain, _ = trained(Splits, of_parts, fitted=False)
    found, captures = trained(Splits, of_parts, fitted=True)
    assert found[0] == plain[0]
    assert all(torch.equal(*pair) for pair in zip(found[1:], plain[1:], strict=True))
    assert captures <= 4


def test_a_number_of_another_type_is_another_call() -> None:
    torch.manual_seed(0)
    model: Any = Weighted()
    memfit.fit(model, BATCH, "smallest", time_limit=1, progress=False)
    for weight in (0.2, 0.3, 0.4, 1):
        model.weight = weight
        expected = F.mse_loss(model.second(torch.sigmoid(model.first(BATCH))), BATCH)
        expected = expected + weight * torch.sigmoid(model.first(BATCH)).square().mean()
        assert torch.equal(model(BATCH), expected)
