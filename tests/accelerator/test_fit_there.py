"""The promises of memfit on a device with a memory of its own: estimate, plan, fit, check, profile."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.rehearse import step
from memfit.capture.sample import Sample
from memfit.measure.peak import measure_peak

_BLOCKS_BYTES = 8192  # small values of a loss and of workspaces, which are counted without their rounding

Case = tuple[nn.Module, torch.Tensor]


def layers(device: torch.device, rows: int = 256) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(4))
    )
    return model.to(device), torch.randn(rows, 64).to(device)


def images(device: torch.device) -> Case:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*blocks).to(device), torch.randn(16, 8, 32, 32).to(device)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss(model, batch).backward()
    return [each.grad.clone() for each in model.parameters()]


def peak_of_a_step(model: nn.Module, batch: torch.Tensor, optimizer: Any = None) -> int:
    def train() -> None:
        model.zero_grad()
        loss(model, batch).backward()
        if optimizer is not None:
            optimizer.step()

    train()
    model.zero_grad()
    return measure_peak(train, resident=[model, batch, *([optimizer] if optimizer else [])]).peak_bytes


def measured_peak(model: nn.Module, batch: torch.Tensor) -> int:
    """Of a step as a plan without a loss counts it."""
    sample = Sample.of(batch)
    step(model, sample, seed=0)
    model.zero_grad()
    return measure_peak(lambda: step(model, sample, seed=0), resident=[model, batch]).peak_bytes


@pytest.mark.parametrize("make", [layers, images])
def test_the_estimate_is_what_is_measured(device: torch.device, make: Any) -> None:
    model, batch = make(device)
    estimate = memfit.estimate(model, batch, loss=loss)
    assert estimate.device == str(device)
    assert estimate.peak_bytes == pytest.approx(peak_of_a_step(model, batch), abs=_BLOCKS_BYTES)


def test_with_an_optimizer_the_estimate_is_what_is_measured(device: torch.device) -> None:
    model, batch = layers(device)
    optimizer = torch.optim.AdamW(model.parameters())
    estimate = memfit.estimate(model, batch, loss=loss, optimizer=optimizer)
    assert estimate.peak_bytes == pytest.approx(peak_of_a_step(model, batch, optimizer), abs=_BLOCKS_BYTES)


@pytest.mark.parametrize("make", [layers, images])
def test_a_fitted_model_makes_the_bits_of_eager_inside_its_budget(device: torch.device, make: Any) -> None:
    eager, batch = make(device)
    planned = copy.deepcopy(eager)
    plan = memfit.plan(planned, batch, budget=0.8)
    memfit.apply(plan, planned, batch)
    for one, other in zip(gradients(eager, batch), gradients(planned, batch), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(eager.buffers(), planned.buffers(), strict=True):
        assert torch.equal(one, other)
    assert measured_peak(planned, batch) == pytest.approx(plan.peak_bytes, abs=_BLOCKS_BYTES)
    assert plan.peak_bytes < plan.unplanned_peak_bytes


def test_check_compares_the_generator_of_the_device(device: torch.device) -> None:
    model, batch = layers(device)
    plan = memfit.plan(model, batch, budget=0.8)
    check = memfit.check(model, plan, batch)
    assert check.exact
    assert {each.part: each.compared for each in check.comparisons}["generator"] == 2


def test_profile_measures_peaks_and_times(device: torch.device) -> None:
    model, batch = layers(device)
    plan = memfit.plan(model, batch, budget=0.8)
    profile = memfit.profile(model, plan, batch, pairs=1, eager=True)
    assert profile.peak_bytes == pytest.approx(plan.peak_bytes, abs=_BLOCKS_BYTES)
    assert profile.eager_peak_bytes == pytest.approx(plan.unplanned_peak_bytes, abs=_BLOCKS_BYTES)
    assert profile.slowdown is not None
