"""`make gpu-check`, on a GPU that is simulated."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.gpu_check import FORMAT, chosen_device, misses_of, report
from benchmarks.gpu_check_case import GpuResult, run_case
from benchmarks.models import Case


def case() -> Case:
    layers = [each for _ in range(6) for each in (torch.nn.Linear(64, 64), torch.nn.Sigmoid())]
    return Case(
        name="tiny",
        batch_size=2048,
        make_model=lambda: torch.nn.Sequential(*layers),
        make_batch=lambda size: torch.randn(size, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        sample=lambda batch: (batch,),
    )


@pytest.mark.slow
def test_a_case_is_checked_and_written_down(device: torch.device, tmp_path: Path) -> None:
    assert chosen_device(None) == device
    result = run_case(case(), device, search_s=0.5, pairs=1)
    assert abs(result.error) < 0.02
    assert result.undecided == ()
    assert all(not plan.differing for plan in result.plans)
    assert [plan.refused for plan in result.plans] == ["", ""]
    assert GpuResult.from_dict(json.loads(json.dumps(result.__dict__, default=vars))).case == result.case
    said = io.StringIO()
    console = Console(file=said, width=200)
    code = report([result], device, tmp_path / "seen.json", failed={}, left_out=["late"], console=console)
    assert code == (1 if misses_of(result) else 0)
    written = json.loads((tmp_path / "seen.json").read_text())
    assert written["format"] == FORMAT
    assert written["left_out"] == ["late"]
    assert "1 cases were checked on a device that is simulated" in said.getvalue()
