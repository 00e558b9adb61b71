"""The largest batch by prediction: it fits, and a tenth more would not."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.errors import InfeasibleBudget, InvalidBudget, InvalidInput
from memfit.measure.peak import measure_peak

pytestmark = pytest.mark.usefixtures("one_thread")


def perceptron():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


CASES = {"perceptron": (perceptron, (32,), "3MiB"), "convolutions": (convolutions, (3, 16, 16), "2MiB")}


def batch_of(size, shape):
    return torch.randn(size, *shape), torch.randint(10, (size,))


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def measured_peak(model, optimizer, batch):
    def step():
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    return measure_peak(step, resident=[model, optimizer, batch]).peak_bytes


@pytest.mark.parametrize(("name", "start"), [("perceptron", 4), ("perceptron", 3000), ("convolutions", 4)])
def test_the_batch_it_names_fits_and_a_tenth_more_does_not(name, start):
    make, shape, budget = CASES[name]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    size = memfit.max_batch(model, batch_of(start, shape), budget, optimizer=optimizer, loss=classify)
    assert size.captures <= 12
    assert size.peak_bytes <= size.budget_bytes < size.next_peak_bytes
    assert measured_peak(model, optimizer, batch_of(size, shape)) <= size.budget_bytes
    assert measured_peak(model, optimizer, batch_of(math.ceil(1.1 * size), shape)) > size.budget_bytes
    assert str(size.budget_bytes // 2**20) in repr(size)


def test_plans_make_room_for_more():
    model, batch = perceptron(), torch.randn(64, 32)
    plain = memfit.max_batch(model, batch, "1MiB")
    planned = memfit.max_batch(model, batch, "1MiB", allow=("recompute", "lean"))
    assert planned > plain
    memfit.fit(model, torch.randn(planned, 32), planned.budget_bytes, time_limit=2.0)


def test_one_sample_that_does_not_fit_is_infeasible():
    with pytest.raises(InfeasibleBudget, match="one sample needs") as raised:
        memfit.max_batch(perceptron(), torch.randn(8, 32), "10KiB")
    assert raised.value.smallest_bytes > 10 * 2**10


def test_bad_input_is_refused():
    with pytest.raises(InvalidBudget, match="number of bytes"):
        memfit.max_batch(perceptron(), torch.randn(8, 32), 0.5)
    with pytest.raises(InvalidInput, match="the batch itself"):
        memfit.max_batch(perceptron(), memfit.Sample((torch.randn(8, 32),)), "1GiB")
