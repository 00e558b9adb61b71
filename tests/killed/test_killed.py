"""A few kills of each kind; `make killed` does hundreds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memfit


@pytest.mark.slow
def test_the_next_run_is_as_if_nothing_had_been_killed(tmp_path: Path) -> None:
    places = [str(Path(memfit.__file__).parents[1]), str(Path(__file__).parents[1])]
    results = tmp_path / "killed.json"
    done = subprocess.run(
        [sys.executable, "-m", "killed", "6", "--results", str(results)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(results.read_text(encoding="utf-8"))
    assert summary["problems"] == []
    assert summary["killed while they ran"] > 0
    assert len(summary["by workload"]) == 6
