"""Gradients taken out of a captured backward pass: whole ones only, each as soon as it exists."""

import copy

import pytest
import torch
from torch import nn

import memfit
from memfit.execute.handover import taking

pytestmark = pytest.mark.usefixtures("one_thread")


class Tied(nn.Module):
    """Three linear layers, two of them with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layers(features)
        return answer


def plain(model, batch):
    return model(batch).square().mean()


def called_twice(model, batch):
    return plain(model, batch) + model(batch + 1).abs().mean()


def with_decay(model, batch):
    return plain(model, batch) + 0.1 * sum(each.square().sum() for each in model.parameters())


def gradients_of(model, loss, batch):
    model.zero_grad()
    loss(model, batch).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("budget", [None, "smallest"])
def test_whole_gradients_are_taken(budget):
    model, batch = Tied(), torch.randn(4, 8)
    expected = gradients_of(copy.deepcopy(model), plain, batch)
    memfit.fit(model, batch, budget=budget)
    parameters, taken = list(model.parameters()), {}

    def take(parameter, gradient):
        assert parameter not in taken
        taken[parameter] = gradient.clone()
        return True

    loss = plain(model, batch)
    with taking(loss, parameters, take):
        loss.backward()
    assert all(parameter.grad is None for parameter in parameters)
    assert all(torch.equal(taken[parameter], each) for parameter, each in zip(parameters, expected, strict=True))
    gradients = gradients_of(model, plain, batch)  # nobody takes them now
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


@pytest.mark.filterwarnings("ignore:several calls go back")
@pytest.mark.parametrize("loss", [called_twice, with_decay])
def test_a_part_of_a_gradient_is_left_to_autograd(loss):
    model, batch = Tied(), torch.randn(4, 8)
    memfit.fit(model, batch)
    expected = gradients_of(model, loss, batch)
    model.zero_grad()
    value, taken = loss(model, batch), []
    with taking(value, list(model.parameters()), lambda parameter, _: bool(taken.append(parameter)) or True):
        value.backward()
    assert not taken
    found = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_others_watch_is_left_to_autograd():
    model, batch = Tied(), torch.randn(4, 8)
    memfit.fit(model, batch)
    seen, taken = [], []
    watched = model.layers[4].weight
    watched.register_hook(lambda gradient: seen.append(gradient.shape))
    loss = plain(model, batch)
    with taking(loss, list(model.parameters()), lambda parameter, _: bool(taken.append(parameter)) or True):
        loss.backward()
    assert len(seen) == 1
    assert watched.grad is not None
    assert all(parameter is not watched for parameter in taken)


def test_a_parameter_can_change_as_soon_as_its_gradient_is_taken():
    """Nothing reads it any more: the other gradients are those of the old values."""
    model, batch = Tied(), torch.randn(4, 8)
    expected = gradients_of(copy.deepcopy(model), plain, batch)
    memfit.fit(model, batch, budget="smallest")
    taken = {}

    def take(parameter, gradient):
        taken[parameter] = gradient.clone()
        with torch.no_grad():
            parameter.fill_(float("nan"))
        return True

    loss = plain(model, batch)
    with taking(loss, list(model.parameters()), take):
        loss.backward()
    assert all(torch.equal(taken[each], value) for each, value in zip(model.parameters(), expected, strict=True))
