"""Hooks on parameters see gradients arrive in eager's order."""

import copy

import pytest
import torch
from torch import nn

import memfit
from memfit import _torch

pytestmark = pytest.mark.usefixtures("one_thread")


class Recurrent(nn.Module):
    """Parts whose gradients come several at a time, and in another order than their parameters stand in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 16)
        self.layers = nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.encoder.self_attn.out_proj.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = self.head(self.layers(self.encoder(states))[0])
        result: torch.Tensor = self.again(self.again(states))
        return result


def order_of(model: nn.Module, batch: torch.Tensor, names: list[str]) -> list[str]:
    order: list[str] = []
    parameters = dict(model.named_parameters())
    handles = [
        parameters[name].register_post_accumulate_grad_hook(lambda _, name=name: order.append(name)) for name in names
    ]
    model.zero_grad()
    model(batch).square().sum().backward()
    for each in handles:
        each.remove()
    return order


@pytest.mark.parametrize("budget", [None, "smallest"])
def test_gradients_arrive_in_the_order_of_eager(budget: str | None) -> None:
    plain, batch = Recurrent(), torch.randn(2, 5, 16)
    loop = None if budget is None else memfit.Loop(gradients="kept")
    fitted = memfit.fit(copy.deepcopy(plain), batch, budget, loop=loop, time_limit=0.1, progress=False)
    names = [name for name, _ in plain.named_parameters()]
    for _ in range(3):  # the quick way of calls that are like the one before, too
        fitted.zero_grad()
        fitted(batch).sum().backward()
    for some in (names, names[::3]):
        assert order_of(fitted, batch, some) == order_of(plain, batch, some)


def test_hooks_on_other_parameters_in_their_place_are_seen() -> None:
    plain, batch = Recurrent(), torch.randn(2, 5, 16)
    fitted = memfit.fit(copy.deepcopy(plain), batch, progress=False)
    orders = {}
    for model in (plain, fitted):
        order: list[str] = []
        others = {name: nn.Parameter(torch.randn_like(each)) for name, each in model.head.named_parameters()}
        for name, each in others.items():
            each.register_hook(lambda _, name=name, order=order: order.append(name))
        for _ in range(3):
            model(batch).sum().backward()
        model.head.weight, model.head.bias = others["weight"], others["bias"]
        model(batch).sum().backward()
        orders[model] = order
    assert orders[fitted] == orders[plain] == ["bias", "weight"]


def test_hooks_of_others_are_counted_and_those_of_memfit_are_not() -> None:
    before = _torch.hooks_registered()
    output = torch.ones(2, requires_grad=True) * 2
    _torch.before_backward(output.grad_fn, lambda _: None)
    assert _torch.hooks_registered() == before
    output.register_hook(lambda _: None)
    assert _torch.hooks_registered() == before + 1
