"""Records of real GPUs, which are not part of the repository: beside it, or where MEMFIT_GPU_TRUTH says."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("MEMFIT_GPU_TRUTH") or Path(__file__).parents[2] / "shared" / "gpu-truth")
TRACES = sorted((FOLDER / "traces").glob("*.json.gz"))

needs_records = pytest.mark.skipif(
    not TRACES,
    reason=f"there are no records of GPUs in {FOLDER}: put them there, or name their folder in MEMFIT_GPU_TRUTH",
)


def trace_named(name: str) -> Path:
    return FOLDER / "traces" / f"{name}.json.gz"
