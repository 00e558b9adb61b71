"""Low-bit optimizers of torchao inside a step. They compile their update, which takes seconds."""

import warnings

import pytest
import torch
from torch import nn
from training import assert_same_parameters, train_plainly, twins

import memfit
from memfit.errors import InvalidInput
from memfit.measure.peak import measure_peak

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def low_bit():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchao.optim")


def square(model, batch):
    return model(batch).square().mean()


def net():
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def test_updates_inside_backward_and_checkpoints(low_bit, tmp_path):
    plain, model = twins(net())
    batches = [torch.randn(8, 64) for _ in range(6)]
    train_plainly(plain, low_bit.AdamW8bit(plain.parameters()), square, batches)
    step = memfit.Step(model, low_bit.AdamW8bit(model.parameters()), square, update="inside")
    for batch in batches[:3]:
        step(batch)
    step.save(tmp_path / "run")
    resumed = net()
    again = memfit.Step(resumed, low_bit.AdamW8bit(resumed.parameters()), square, update="inside")
    again.load(tmp_path / "run")
    for batch in batches[3:]:
        step(batch)
        again(batch)
    assert_same_parameters(model, plain)
    assert_same_parameters(resumed, plain)
    assert type(again.optimizer.state[resumed[0].weight]["exp_avg"]).__name__ == "OptimState8bit"


def test_a_tier_is_refused(low_bit, tmp_path):
    model = net()
    with pytest.raises(InvalidInput, match="AdamW8bit keeps its state"):
        memfit.Step(model, low_bit.AdamW8bit(model.parameters()), square, state_tier="disk", directory=tmp_path)


@pytest.mark.parametrize(("name", "budget"), [("AdamW8bit", 0.8), ("AdamW4bit", 1.0)])
def test_a_budget_is_kept_with_quantized_state(low_bit, name, budget):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512))
    optimizer = getattr(low_bit, name)(model.parameters())
    batch = torch.randn(1024, 512)
    step = memfit.Step(model, optimizer, square, budget=budget, sample=batch)
    step(batch)
    peak_bytes = measure_peak(lambda: step(batch), resident=[model, optimizer, batch]).peak_bytes
    assert peak_bytes <= step.choice.budget_bytes
    assert abs(step.choice.peak_bytes / peak_bytes - 1) < 0.02
