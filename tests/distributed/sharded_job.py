"""Starts the ranks of `one_sharded_rank.py`, once for all tests that look at what they found."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from launching import filled_once
from sharded_models import BATCH, Blocks

import memfit
from memfit.distributed import save_sharded

HERE = Path(__file__).parent


def run_ranks(folder: Path, cases: tuple[str, ...], ranks: int = 2, seconds: int = 240) -> list[dict[str, Any]]:
    """Run cases on some ranks; what each of them wrote down."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    job = subprocess.Popen(
        [*command, str(HERE / "one_sharded_rank.py"), str(folder), *cases],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = job.communicate(timeout=seconds)
    finally:
        job.terminate()
    assert job.returncode == 0, errors[-5000:]
    return _found(folder, ranks)


@functools.cache
def fast_job() -> tuple[Path, list[dict[str, Any]]]:
    """Everything that the fast tests look at, in one job."""
    folder = filled_once("sharded", _fill)
    return folder, _found(folder, ranks=2)


def _fill(folder: Path) -> None:
    """A checkpoint of one process, and then the ranks."""
    torch.manual_seed(3)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = memfit.Step(model, optimizer, lambda model, batch: model(batch))
    for _ in range(2):
        step(torch.randn(BATCH, 16, 32))
    save_sharded(folder / "from_one", model, optimizer, step=step, extra={"epoch": 3})
    torch.save([each.detach() for each in model.parameters()], folder / "one.pt")
    run_ranks(folder, ("policies", "training", "refusals", "checkpoint", "together"))


def _found(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
