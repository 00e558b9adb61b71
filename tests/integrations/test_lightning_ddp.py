"""Lightning's DDP strategy: two processes train the same with the callback as without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")

SCRIPT = """
import sys, torch
from memfit.cli.torchvision_repair import prepare
prepare()
import lightning as L
from memfit.integrations.lightning import MemfitCallback
from tests.integrations.test_lightning import Coder, loader

torch.set_num_threads(1)
planned = sys.argv[1] == "planned"
callback = MemfitCallback(budget=0.9, time_limit=1.0, measure_every=1)
torch.manual_seed(1)
model = Coder()
trainer = L.Trainer(
    max_epochs=2, accelerator="cpu", strategy="ddp", devices=2, callbacks=[callback] if planned else [], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=True,
)
trainer.fit(model, loader())
if trainer.global_rank == 0:
    steps = trainer.global_step
    peak = callback.peak_bytes / callback.fitted.budget_bytes if planned else 0.0
    print("RESULT", peak, *[each.hex() for each in model.losses[-steps:]])
"""


@pytest.mark.slow
def test_two_processes_train_the_same(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    results = {}
    for way in ("plain", "planned"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(script), way],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MASTER_ADDR": "127.0.0.1"},
        )
        line = next(each for each in done.stdout.splitlines() if each.startswith("RESULT"))
        _, peak, *losses = line.split()
        results[way] = float(peak), losses
    assert results["planned"][1] == results["plain"][1]
    assert len(results["plain"][1]) == 4
    assert 0 < results["planned"][0] <= 1
