"""Rows of the table of techniques on a model that takes milliseconds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import Case
from benchmarks.rounding import SYMBOLS, Language, Transformer, entropy, loss, trained
from benchmarks.techniques import run_row

CASE = Case(
    name="perceptron",
    batch_size=4,
    make_model=lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))),
    make_batch=lambda size: (torch.randn(size, 128), torch.randint(128, (size,))),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    sample=lambda batch: (batch[0],),
)


@pytest.mark.parametrize("technique", ["update inside backward", "optimizer state on disk"])
def test_a_row_saves_what_the_technique_is_for(technique, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_DISK", str(tmp_path))
    row = run_row(CASE, technique)
    assert row.state_bytes >= 2 * row.gradient_bytes
    expected = row.gradient_bytes if technique == "update inside backward" else row.state_bytes
    assert row.plain_peak_bytes - row.peak_bytes >= 0.7 * expected
    assert row.time_ratio > 0


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
