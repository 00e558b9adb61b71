"""Rows of the table of techniques on a model that takes milliseconds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.joint import row_of
from benchmarks.models import Case
from benchmarks.rounding import SYMBOLS, Language, Transformer, entropy, loss, trained
from benchmarks.steps import Steps
from benchmarks.techniques import Techniques

CASE = Case(
    name="perceptron",
    batch_size=4,
    make_model=lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))),
    make_batch=lambda size: (torch.randn(size, 128), torch.randint(128, (size,))),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    sample=lambda batch: (batch[0],),
)


@pytest.fixture
def steps(tmp_path):
    return Steps(CASE, tmp_path, time_limit_s=1.0)


@pytest.mark.slow
def test_a_row_saves_what_the_technique_is_for(steps):
    techniques = Techniques(steps)
    inside, disk, planned = (
        techniques.row(each) for each in ("update inside backward", "optimizer state on disk", "1. planned")
    )
    assert inside.state_bytes >= 2 * inside.gradient_bytes
    assert inside.plain_peak_bytes - inside.peak_bytes >= 0.7 * inside.gradient_bytes
    assert disk.plain_peak_bytes - disk.peak_bytes >= 0.7 * disk.state_bytes
    for row in (inside, disk, planned):
        assert row.predicted_bytes == pytest.approx(row.peak_bytes, rel=0.02)
        assert row.time_ratio > 0


@pytest.mark.slow
def test_a_choice_is_held_against_the_fastest_single_technique(steps):
    row = row_of(steps, 0.5)
    assert row.measured_bytes <= row.budget_bytes
    assert row.predicted_bytes == pytest.approx(row.measured_bytes, rel=0.02)
    assert row.chosen
    assert row.predicted_ratio is None or row.predicted_ratio <= 1.0
    assert "no way to run" in row_of(steps, 0.01).reason


def test_the_language_can_be_learnt_in_every_precision():
    language = Language()
    torch.manual_seed(0)
    model, batches = Transformer(), [language.batch(4) for _ in range(3)]
    assert 0 < entropy(language, batches[0]) < torch.tensor(SYMBOLS).log()
    with torch.no_grad():
        before = loss(model, batches[0])
    for precision in ("fp32", "nearest", "stochastic"):
        finished = trained(model, batches, precision).float()
        with torch.no_grad():
            assert loss(finished, batches[0]) < before
