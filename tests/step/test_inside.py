"""Updates inside the backward pass: gradients are never all live."""

import copy

import pytest
import torch
from torch import nn
from training import TiedNet, assert_same_parameters, classify, rows, train_plainly, twins

import memfit
from memfit.errors import InvalidInput
from memfit.measure.peak import held_bytes, measure_peak

pytestmark = pytest.mark.usefixtures("one_thread")


def wide():
    """Sixteen equal layers with more bytes in parameters than in activations."""
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)), nn.Linear(256, 4))


def wide_rows():
    return torch.randn(4, 256), torch.randint(4, (4,))


def peak_of(model, batch, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = memfit.Step(model, optimizer, classify, **options)
    step(batch)
    return measure_peak(lambda: step(batch), resident=[model, optimizer, batch]).peak_bytes


@pytest.mark.parametrize("planned", [False, True])
def test_the_peak_drops_by_the_gradients(planned):
    model, batch = wide(), wide_rows()
    if planned:
        memfit.fit(model, batch[0])
    gradient_bytes = held_bytes([model])
    saved = peak_of(copy.deepcopy(model), batch) - peak_of(model, batch, update="inside")
    assert saved >= 0.8 * gradient_bytes


def test_captured_calls_accumulate_without_a_second_set_of_gradients():
    model, batch = wide(), wide_rows()
    planned = memfit.fit(copy.deepcopy(model), batch[0])
    eager = peak_of(model, batch, micro_batches=2)
    assert peak_of(planned, batch, micro_batches=2) <= eager + 0.1 * held_bytes([model])


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("update", ["after", "inside"])
def test_micro_batches_of_planned_and_plain_models_are_the_same(planned, update):
    """Nothing is re-associated between the two: bit for bit."""
    plain, model = twins(TiedNet())
    batches = [rows(8) for _ in range(10)]
    if planned:
        memfit.fit(model, batches[0][0][:4], budget="smallest", loop=memfit.Loop(gradients="kept"), time_limit=0.5)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        for part in range(0, 8, 4):
            (classify(plain, (batch[0][part : part + 4], batch[1][part : part + 4])) / 2).backward()
        optimizer.step()
    step = memfit.Step(model, torch.optim.AdamW(model.parameters(), lr=0.01), classify, micro_batches=2, update=update)
    for batch in batches:
        step(batch)
    assert_same_parameters(model, plain)


def test_a_parameter_that_only_the_first_piece_uses_is_updated():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, features):
            return self.always(features) + (self.sometimes(features) if len(features) == 3 else 0)

    model = Sometimes()
    before = model.sometimes.weight.clone()
    step = memfit.Step(model, torch.optim.SGD(model.parameters()), classify, micro_batches=2, update="inside")
    step(rows(5))
    assert not torch.equal(model.sometimes.weight, before)
    assert model.sometimes.weight.grad is None


def test_no_hook_stays():
    model = TiedNet()
    step = memfit.Step(model, torch.optim.SGD(model.parameters()), classify, update="inside")
    step(rows())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_frozen_parameters_stay():
    plain, model = twins(TiedNet())
    for each in (plain, model):
        each.first.requires_grad_(False)
    batches = [rows() for _ in range(3)]
    train_plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.1), classify, batches)
    step = memfit.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), classify, update="inside")
    for batch in batches:
        step(batch)
    assert_same_parameters(model, plain)


def test_step_hooks_are_refused():
    model = TiedNet()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(InvalidInput, match="hooks"):
        memfit.Step(model, optimizer, classify, update="inside")


def test_step_hooks_that_come_later_are_refused_before_anything_is_updated():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = memfit.Step(model, optimizer, lambda model, batch: model(batch).square().mean(), update="inside")
    optimizer.register_step_post_hook(lambda *_: None)
    before = model.weight.detach().clone()
    with pytest.raises(InvalidInput, match="hooks"):
        step(torch.ones(3, 4))
    assert torch.equal(model.weight, before)


class Strange(torch.optim.SGD):
    """Looks at all gradients together, for all anybody knows."""


def test_an_unknown_optimizer_is_refused_by_name():
    model = TiedNet()
    with pytest.raises(InvalidInput, match="Strange is not known"):
        memfit.Step(model, Strange(model.parameters()), classify, update="inside")
    memfit.Step(model, Strange(model.parameters()), classify, update="inside", allow=("unknown-optimizer",))(rows())


def test_lbfgs_is_refused_by_name():
    model = TiedNet()
    with pytest.raises(InvalidInput, match="LBFGS"):
        memfit.Step(model, torch.optim.LBFGS(model.parameters()), classify)


def test_gpt2_with_dropout_and_tied_weights(tiny_gpt2):
    plain, model = twins(tiny_gpt2().train())
    words = [torch.randint(100, (2, 16)) for _ in range(5)]
    batches = [{"input_ids": each, "labels": each} for each in words]

    def loss(model, batch):
        return model(**batch).loss

    memfit.fit(model, batches[0], budget="smallest", time_limit=1.0)
    torch.manual_seed(4)
    losses = train_plainly(plain, torch.optim.AdamW(plain.parameters()), loss, batches)
    step = memfit.Step(model, torch.optim.AdamW(model.parameters()), loss, update="inside")
    torch.manual_seed(4)
    assert all(torch.equal(step(batch), expected) for batch, expected in zip(batches, losses, strict=True))
    assert_same_parameters(model, plain)
