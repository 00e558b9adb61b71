"""A loop of Accelerate with one line more, before and after `prepare`."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.measure.peak import measure_peak

accelerate = pytest.importorskip("accelerate")

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [each for _ in range(3) for each in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), *hidden, nn.Linear(32, 16))


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(batch), batch)


def train(when: str, precision: str) -> tuple[list[float], float]:
    """Losses, and how much of its budget the step took."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    losses, used = [], 0.0
    options = {"budget": 0.85, "optimizer": optimizer, "loss": loss, "time_limit": 1.0}
    if when == "before":
        assert memfit.integrations.accelerate.fit(accelerator, model, x, **options) is model
    model, optimizer = accelerator.prepare(model, optimizer)
    if when == "after":
        options["optimizer"] = optimizer
        assert memfit.integrations.accelerate.fit(accelerator, model, x, **options) is model

    def step() -> None:
        for batch in (x, x):
            with accelerator.accumulate(model):
                value = loss(model, batch)
                accelerator.backward(value)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(value))

    step()
    if when:
        plan = memfit.plan_of(model)
        assert plan is not None
        peak = measure_peak(step, resident=[model, optimizer.optimizer, x]).peak_bytes
        used = peak / plan.budget_bytes
    else:
        step()
    return losses, used


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_losses_are_the_same_before_and_after_prepare(precision: str) -> None:
    plain, _ = train("", precision)
    for when in ("before", "after"):
        losses, used = train(when, precision)
        assert losses == plain
        assert 0.5 < used <= 1


def test_a_strategy_that_cannot_be_kept_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "distributed_type", accelerate.utils.DistributedType.FSDP, raising=False)
    with pytest.raises(memfit.InvalidInput, match="FSDP"):
        memfit.integrations.accelerate.fit(accelerator, layers(), torch.randn(2, 16), budget=0.5)
