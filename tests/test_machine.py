from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit import machine
from memfit.machine import processor


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    processor.cache_clear()
    yield
    processor.cache_clear()


def test_processors_with_other_instructions_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PROCESSORS", tmp_path / "cpuinfo")
    found = []
    for text in ("flags : fpu avx2\n", "flags : fpu avx2 avx512f\n", "model name : Some\nflags : fpu avx2\n", "\xff"):
        (tmp_path / "cpuinfo").write_text(text, encoding="latin-1")
        processor.cache_clear()
        found.append(processor())
    assert len({*found}) == 4
    assert "avx512f" in found[1]


def test_without_that_file_it_is_what_python_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PROCESSORS", tmp_path / "none")
    assert processor()
