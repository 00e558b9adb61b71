"""Compiled kernels where the compiler or its cache on disk is not what it should be. Each is a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # compiles
JOB = Path(__file__).parent / "stretch_job.py"


def run_job(cache: Path | str, **environment: str) -> dict[str, Any]:
    outcome = subprocess.run(
        [sys.executable, str(JOB)],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    found: dict[str, Any] = json.loads(outcome.stdout.splitlines()[-1]) | {"errors": outcome.stderr}
    assert found["difference"] < 1e-4
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("kernels")
    job = run_job(cache)
    assert job["warnings"] == []
    assert job["compiled"] > 0
    assert list(cache.rglob("*.so"))
    return cache


@pytest.mark.parametrize("knows_files", [True, False])
def test_a_filled_cache_is_used(filled: Path, knows_files: bool, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in filled.rglob("*.so")}
    job = run_job(filled) if knows_files else run_job(filled, MEMFIT_CACHE_DIR=str(tmp_path))
    assert job["warnings"] == []
    found = job["kept" if knows_files else "found"]
    assert found > 0
    assert job["compiled"] <= found // 4  # times differ from run to run, and plans with them
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize("content", [b"", b"not a library at all"])
def test_kernels_that_were_damaged_are_compiled_anew(filled: Path, content: bytes, tmp_path: Path) -> None:
    cache = shutil.copytree(filled, tmp_path / "kernels")
    for library in cache.rglob("*.so"):
        library.write_bytes(content)
    warnings = run_job(cache)["warnings"]
    assert not [warning for warning in warnings if "eager kernels" in warning]
    is_repaired = any(library.read_bytes() != content for library in cache.rglob("*.so"))  # by Inductor itself
    assert is_repaired or any("compiled anew" in warning for warning in warnings)


def test_a_cache_that_cannot_be_made_is_said_and_another_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run_job(tmp_path / "file" / "cache", TMPDIR=str(tmp_path))
    assert "compiled kernels are kept in" in found["errors"]
    assert found["warnings"] == []
    assert list(tmp_path.rglob("*.so"))


def test_a_missing_compiler_is_said(tmp_path: Path) -> None:
    (warning, *_) = run_job(tmp_path, CXX="/nowhere/no-compiler")["warnings"]
    assert "runs with eager kernels" in warning
