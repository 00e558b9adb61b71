"""The examples run as their first lines say, on two processes and on one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

pytestmark = pytest.mark.slow


def example(name: str, *arguments: object, ranks: int = 2) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "examples" / name), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return outcome.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_ddp(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path))
    assert "resumed after 3 batches, equal bit for bit: True" in example("ddp.py", ranks=ranks)


def test_fsdp() -> None:
    losses = re.search(r"loss ([\d.]+); from the checkpoint, without a plan, ([\d.]+)", example("fsdp.py"))
    assert losses is not None
    assert losses[1] == losses[2]


def test_imagenet(tmp_path: Path) -> None:
    data, plan, checkpoints = tmp_path / "data", tmp_path / "plan.json", tmp_path / "checkpoints"
    example("imagenet.py", data, "--generate", ranks=1)
    common = [data, "--arch", "resnet18", "--batch-size", 16, "--pixels", 48, "--lr", 0.01, "--plan", plan]
    first = example("imagenet.py", *common, "--budget", "smallest", "--epochs", 2, "--checkpoints", checkpoints)
    assert "epoch 1: loss" in first
    assert plan.exists()
    further = example("imagenet.py", *common, "--epochs", 3, "--checkpoints", checkpoints, "--resume")
    assert "going on after 16 batches" in further
    assert "epoch 2: loss" in further
    assert "epoch 1: loss" not in further
    judged = example("imagenet.py", *common, "--checkpoints", checkpoints, "--resume", "--evaluate")
    assert further.rstrip().rpartition("accuracy ")[2] in judged
