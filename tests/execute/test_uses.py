"""Gradients of what a call uses several times are added in eager's order."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit

pytestmark = pytest.mark.usefixtures("one_thread")

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Again(nn.Module):
    """Uses a layer three times, and its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            batch = torch.tanh(self.layer(batch)) + batch
        return batch


class Words(nn.Module):
    """Has one table of words under as many names as T5 has."""

    def __init__(self, *, names: int) -> None:
        super().__init__()
        self.shared, self.layer = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.others = nn.ModuleList(nn.Embedding(20, 8) for _ in range(names - 2))
        self.scores = nn.Linear(8, 20, bias=False)
        for each in (*self.others, self.scores):
            each.weight = self.shared.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        words = (batch[:, :6].abs() * 7).long() % 20
        states = self.shared(words)
        for each in self.others:
            states = torch.tanh(self.layer(states)) + each(words.flip(1))
        result: torch.Tensor = self.scores(torch.tanh(self.layer(states)))
        return result


def once(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - model(batch.sin()).cos()).square().mean()


def penalty(model: nn.Module) -> torch.Tensor:
    return sum((each.sin() * each).sum() for each in model.parameters())  # type: ignore[return-value]


def with_penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return once(model, batch) + penalty(model)


def with_penalty_before(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return penalty(model) + once(model, batch)


def with_penalty_between(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    first = model(batch)
    between = penalty(model)
    return (first - model(batch.sin())).square().mean() + between


def with_input_used_later(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    given = batch.requires_grad_().cos()
    return (model(given) * given.sin()).sum()


def gradients(model: nn.Module, loss: Loss) -> list[torch.Tensor]:
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    loss(model, batch).backward()
    found = [batch.grad, *(each.grad for each in model.parameters())]
    return [each for each in found if each is not None]


def assert_as_in_eager(plain: nn.Module, loss: Loss) -> None:
    fitted = memfit.fit(copy.deepcopy(plain), torch.randn(4, 8), "1MiB", time_limit=0.1, progress=False)
    eager = gradients(plain, loss)
    assert eager
    for _ in range(2):
        assert all(map(torch.equal, gradients(fitted, loss), eager))


LOSSES = [once, twice, with_penalty, with_penalty_before, with_penalty_between]


@pytest.mark.parametrize("loss", [*LOSSES, with_input_used_later])
def test_of_a_layer_that_is_used_again(loss: Loss) -> None:
    torch.manual_seed(0)
    assert_as_in_eager(Again(), loss)


@pytest.mark.parametrize("names", [2, 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_of_a_table_of_words_with_several_names(loss: Loss, names: int) -> None:
    torch.manual_seed(0)
    assert_as_in_eager(Words(names=names), loss)


def test_of_a_graph_that_is_gone_through_twice() -> None:
    torch.manual_seed(0)

    def retained(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = twice(model, batch)
        loss.backward(retain_graph=True)
        return loss

    assert_as_in_eager(Again(), retained)


def test_of_a_forward_that_writes_into_parameters_is_refused() -> None:
    class Writes(Again):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.layer.weight.clamp_(-0.2, 0.2)
            return super().forward(batch)

    model = memfit.fit(Writes(), torch.randn(4, 8), progress=False)
    gradients(model, once)
    with pytest.raises(memfit.ExecutionError, match="is used by the loop or by another call as well"):
        gradients(model, with_penalty)
