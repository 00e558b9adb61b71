"""A call that is like the last one is not looked up; one that is not, is. See Note [Like the last call]."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from twins import ConvNet, assert_same, train_step

import memfit
from memfit.execute import attach


def warm(eager, batch):
    """A fitted twin that has seen two calls of one kind."""
    captured = memfit.fit(copy.deepcopy(eager), batch)
    for model in (eager, captured):
        train_step(model, batch)
        train_step(model, batch)
    return captured


def seeded(call, *args):
    torch.manual_seed(3)
    return call(*args)


def test_a_call_like_the_last_is_not_looked_up(monkeypatch):
    batch = torch.randn(4, 3, 8, 8)
    eager = ConvNet()
    captured = warm(eager, batch)
    monkeypatch.setattr(attach, "kind_of_call", None)
    other = torch.randn(4, 3, 8, 8)
    assert_same(train_step(eager, other), train_step(captured, other))
    assert captured.forward.runs == 3


def test_calls_of_two_kinds_in_turns_are_looked_up_and_nothing_is_made_for_the_next(monkeypatch):
    captured = memfit.fit(ConvNet(), torch.randn(4, 3, 8, 8))

    def refuse(*_):
        raise AssertionError("nobody will need it")

    monkeypatch.setattr(attach.LastCall, "of", refuse)
    for rows in (4, 2, 4, 2):
        train_step(captured, torch.randn(rows, 3, 8, 8))
    assert captured.forward.runs == 4


def _turn_weights(model):
    weight = model.head.weight
    weight.data = weight.data.t().contiguous().t()


def _freeze_the_head(model):
    model.head.weight.requires_grad_(False)


def _evaluate_a_part(model):
    next(part for part in model.modules() if isinstance(part, nn.BatchNorm2d)).eval()


def _replace_the_head(model):
    torch.manual_seed(7)
    model.head = nn.Linear(model.head.in_features, 5)


def _replace_a_parameter(model):
    torch.manual_seed(7)
    model.head.bias = nn.Parameter(torch.randn_like(model.head.bias))


def _use_doubles(model):
    model.double()


def _add_a_buffer(model):
    model.register_buffer("more", torch.ones(1))


CHANGES = [
    _turn_weights,
    _freeze_the_head,
    _evaluate_a_part,
    _replace_the_head,
    _replace_a_parameter,
    _use_doubles,
    _add_a_buffer,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__.strip("_"))
def test_what_changes_between_calls_is_noticed(change):
    batch = torch.randn(4, 3, 8, 8)
    eager = ConvNet()
    captured = warm(eager, batch)
    for model in (eager, captured):
        model.zero_grad()
        change(model)
    batch = batch.double() if change is _use_doubles else batch
    assert_same(train_step(eager, batch), train_step(captured, batch))


def test_a_call_without_gradients_runs_by_its_own_forward():
    batch = torch.randn(4, 3, 8, 8)
    captured = warm(ConvNet(), batch)
    with torch.no_grad():
        assert captured(batch).grad_fn is None
    captured.eval()(batch)
    assert captured.forward.runs == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda model, batch: model(batch, scale=2.0),
        lambda model, batch: model(batch.to(memory_format=torch.channels_last)),
        lambda model, batch: model(batch[:2]),
        lambda model, batch: model(batch.clone().requires_grad_()),
    ],
    ids=["constant", "layout", "size", "gradient"],
)
def test_other_arguments_are_noticed(call):
    batch = torch.randn(4, 3, 8, 8)
    eager = ConvNet()
    captured = warm(eager, batch)
    assert torch.equal(seeded(call, captured, batch), seeded(call, eager, batch))
    assert len(captured.forward.calls) == 2
    assert_same(train_step(eager, batch), train_step(captured, batch))


class Shifted(nn.Module):
    """A number or a tensor in either place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, features, scale=None, shift=None):
        made = self.linear(features)
        made = made if scale is None else made * scale
        return made if shift is None else made + shift


@pytest.mark.parametrize("number", [2.0, None])
def test_a_tensor_in_another_place_is_noticed(number):
    eager, captured = Shifted(), Shifted()
    batch, other = torch.randn(2, 4), torch.randn(2, 4)
    memfit.fit(captured, {"features": batch, "scale": number, "shift": other})
    for _ in range(2):
        captured(features=batch, scale=number, shift=other)
    expected = eager(features=batch, scale=other, shift=number)
    assert torch.equal(captured(features=batch, scale=other, shift=number), expected)


class Tied(nn.Module):
    """One weight for two parts, and one part used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.third = self.second

    def forward(self, features):
        return self.third(self.second(self.first(features)))


def test_tied_weights_are_not_looked_up_again_and_untied_ones_are(monkeypatch):
    eager, captured, batch = Tied(), Tied(), torch.randn(2, 4)
    memfit.fit(captured, batch)
    for _ in range(2):
        captured(batch)
    with monkeypatch.context() as patched:
        patched.setattr(attach, "kind_of_call", None)
        assert torch.equal(captured(batch), eager(batch))
    for model in (eager, captured):
        torch.manual_seed(1)
        model.second.weight = nn.Parameter(torch.randn(4, 4))
    assert torch.equal(captured(batch), eager(batch))


def test_a_frozen_model_runs_by_its_own_forward_whatever_it_is_given():
    captured = memfit.fit(Shifted(), {"features": torch.randn(2, 4), "scale": 2.0})
    captured(features=torch.randn(2, 4), scale=2.0)
    captured.requires_grad_(False)
    number = type("Number", (), {"__rmul__": lambda self, other: other})()  # may change from call to call
    features = torch.randn(2, 4)
    assert torch.equal(captured(features=features, scale=number), captured.linear(features))


def test_autocast_is_noticed():
    batch = torch.randn(4, 3, 8, 8)
    eager = ConvNet()
    captured = warm(eager, batch)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert torch.equal(seeded(captured, batch), seeded(eager, batch))
    assert len(captured.forward.calls) == 2


def test_a_batch_that_is_a_parameter_is_looked_up():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, features):
            return features @ self.weight

    eager = Product()
    batch = torch.randn(4, 4, requires_grad=True)
    captured = memfit.fit(copy.deepcopy(eager), batch)
    captured(batch)
    captured(batch)
    captured(captured.weight).sum().backward()
    eager(eager.weight).sum().backward()
    assert torch.equal(captured.weight.grad, eager.weight.grad)


def test_a_parameter_that_was_replaced_is_not_held():
    batch = torch.randn(4, 3, 8, 8)
    captured = warm(ConvNet(), batch)
    captured.zero_grad()
    old = weakref.ref(captured.head.weight)
    captured.head.weight = nn.Parameter(captured.head.weight.detach().clone())
    gc.collect()
    assert old() is None
