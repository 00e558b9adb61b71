"""Two ranks on two simulated devices: a plan they agree on, inside DDP, makes the gradients of eager."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_JOB = Path(__file__).parent / "ddp_there_job.py"


@pytest.mark.slow
def test_a_planned_model_inside_ddp_makes_the_gradients_of_eager(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MEMFIT_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(_JOB.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(_JOB), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    assert all((tmp_path / f"rank{rank}").read_text() == "equal" for rank in range(2))
