"""The measured step around regions."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.rehearse import drop_gradients
from memfit.ir import Phase
from memfit.measure.peak import measure_peak
from memfit.plan.regions import Stretch
from memfit.regions.whole import _lowest

FORWARD = (0, Phase.FORWARD)


def run_of(*live_bytes: int, running: tuple[int, Phase] | None = FORWARD) -> list[Stretch]:
    return [Stretch(live_bytes=each, waiting={}, running=running) for each in live_bytes]


def test_a_release_that_one_run_did_not_see_is_seen_by_another() -> None:
    lowest = _lowest([run_of(10, 30, 25, 15), run_of(10, 20, 25, 25), run_of(10, 20, 15, 15)])
    assert [each.live_bytes for each in lowest] == [10, 20, 15, 15]


def test_runs_that_went_another_way_are_taken_whole() -> None:
    assert _lowest([run_of(10, 40), run_of(20, 30, running=None)]) == run_of(20, 30, running=None)


@dataclasses.dataclass
class Record:
    x: torch.Tensor


class AsksForValues(nn.Module):
    """Returns more than its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 256)

    def forward(self, x: Any) -> dict[str, torch.Tensor]:
        x = x.x if isinstance(x, Record) else x
        y = self.inner(x * 0.5 if x.mean().item() > 0 else x).square()
        return {"loss": (y.tanh() - y.tanh().mean()).square().mean(), "logits": y}


def assert_tells_the_peak(model: nn.Module, batch: Any, held: list[torch.Tensor]) -> None:
    def step() -> None:
        output = model(batch)
        output["loss"].backward()

    step()
    drop_gradients(model, memfit.Sample((batch,)))
    peak_bytes = measure_peak(step, resident=[model, held]).peak_bytes
    estimate = memfit.estimate(model, memfit.Sample((batch,)), progress=False)
    assert abs(estimate.peak_bytes - peak_bytes) <= 64


def test_what_a_model_returns_beside_its_loss_is_held_in_the_estimate_of_one_that_asks_for_values() -> None:
    x = torch.randn(64, 32)
    assert_tells_the_peak(AsksForValues(), x, [x])


def test_a_batch_in_a_record_is_counted() -> None:
    x = torch.randn(64, 32)
    assert_tells_the_peak(AsksForValues(), Record(x), [x])


class Residual(nn.Module):
    """Blocks beside which their argument goes on, so that its gradient is held while they go back."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if rows.abs().mean() > -1:
                rows = rows + block(rows)
        return rows.square().mean()


def test_a_gradient_that_goes_around_a_region_too_is_held_in_its_backward_pass() -> None:
    torch.manual_seed(0)
    model, sample = Residual(), torch.randn(256, 32)
    plan = memfit.plan(model, sample, budget="smallest", time_limit=0.5)
    measured = memfit.profile(model, plan, sample, pairs=1)
    assert measured.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.001)


class Tied(nn.Module):
    """Under autocast its weight is cast once for both, so that it cannot be captured whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(32, 64)
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.other.weight = self.one.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.other(nn.functional.silu(self.one(self.embedding(tokens))))


def in_16_bits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output: torch.Tensor = model(tokens)
        return output.float().square().mean()


@pytest.mark.parametrize("fits_inside", [False, True])
def test_casts_of_one_step_are_not_there_in_the_next_that_is_measured(fits_inside: bool, one_thread: None) -> None:
    """Where `fit` is called under autocast, its block does not end with the step."""
    torch.manual_seed(0)
    model, tokens = Tied(), torch.randint(32, (2, 4))
    with torch.autocast("cpu", torch.bfloat16, enabled=fits_inside):
        memfit.fit(model, tokens, "smallest", loss=in_16_bits, remember=False, progress=False)
    plan = memfit.plan_of(model)
    assert plan is not None

    def step() -> None:
        in_16_bits(model, tokens).backward()

    step()
    model.zero_grad()
    assert measure_peak(step, resident=[model, tokens]).peak_bytes == plan.peak_bytes
