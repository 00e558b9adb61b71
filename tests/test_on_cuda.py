"""The same promises on a CUDA device, where there is one."""

import copy

import pytest
import torch
from torch import nn

import memfit
from memfit.measure.peak import measure_peak

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512))
    return layers.cuda(), torch.randn(1024, 512, device="cuda")


def test_the_estimate_is_true() -> None:
    model, batch = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    estimate = memfit.estimate(model, batch, loss=lambda each, x: each(x).square().mean(), optimizer=optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    measured = measure_peak(step, resident=[model, optimizer, batch])
    assert estimate.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)
    assert max(measured.live_bytes) == pytest.approx(measured.peak_bytes, rel=0.01)


def test_the_captured_model_equals_eager() -> None:
    eager, batch = model_and_batch()
    captured = memfit.fit(copy.deepcopy(eager), batch)
    for model in (eager, captured):
        torch.manual_seed(0)
        model(batch).square().mean().backward()
    for one, other in zip(eager.parameters(), captured.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
