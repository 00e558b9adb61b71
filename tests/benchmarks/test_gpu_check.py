"""`make gpu-check` where there is no GPU; on one that is simulated: `tests/accelerator/test_gpu_check_there.py`."""

import dataclasses

import pytest
import torch

from benchmarks.gpu_check import NO_GPU, main, misses_of
from benchmarks.gpu_check_case import GpuResult, PlanResult


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert main([]) == 2
    assert capsys.readouterr().out.strip() == NO_GPU


def test_what_is_missed_is_said_in_sentences() -> None:
    plan = PlanResult(name="half", budget_bytes=1000, predicted_bytes=900, measured_bytes=900)
    result = GpuResult(
        case="tiny x1",
        estimated_bytes=1000,
        estimated_highest_bytes=1000,
        measured_bytes=1010,
        estimated_reserved_bytes=2000,
        measured_reserved_bytes=2000,
        undecided=(),
        plans=(plan,),
    )
    assert misses_of(result) == []
    worse = dataclasses.replace(plan, measured_bytes=1200, differing=("0.weight",))
    missed = misses_of(dataclasses.replace(result, measured_bytes=1200, plans=(worse,)))
    assert len(missed) == 3
    assert "200 B over its budget" in missed[2]
