"""The quick starts of the three tools with one line more. Each script compares and measures for itself."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "needs"),
    [("trainer", "transformers"), ("lightning_fit", "lightning"), ("accelerate_fit", "accelerate")],
)
def test_a_quick_start_trains_the_same_inside_its_budget(script: str, needs: str) -> None:
    pytest.importorskip(needs)
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / f"{script}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "budget" in done.stdout
