"""Half a compiled file is never where it is looked for."""

import os
import time
from pathlib import Path

import pytest
from torch._inductor import codecache

from memfit import _compiler_start, _whole_builds


class Builder:
    """Writes in two halves, as compilers do; `fail` is called between them."""

    def __init__(self, target: Path, fail=lambda: None) -> None:
        self._target_file, self._output, self._fail = str(target), f"-o {target}", fail

    def get_target_file_path(self) -> str:
        return self._target_file

    def build(self) -> None:
        place = Path(self._output.removeprefix("-o "))
        place.write_text("half")
        self._fail()
        place.write_text("half and half")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "kernel.so"


def test_a_result_is_moved_to_its_place_when_it_is_whole(target: Path) -> None:
    seen = []
    builder = Builder(target, lambda: seen.append(target.exists()))
    codecache_build(target, builder)
    assert seen == [False]
    assert [(path.name, path.read_text()) for path in target.parent.glob("*.so")] == [("kernel.so", "half and half")]
    assert builder.get_target_file_path() == str(target)


def test_nothing_is_there_after_a_compiler_that_was_ended(target: Path) -> None:
    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        codecache_build(target, Builder(target, killed))
    assert not list(target.parent.glob("*.so"))


def test_what_is_there_is_not_compiled_again(target: Path) -> None:
    target.write_text("whole")
    codecache_build(target, Builder(target))
    assert target.read_text() == "whole"


def test_folders_that_killed_processes_left_go_when_nobody_can_be_using_them(target: Path) -> None:
    old, new = target.parent / "memfit-old", target.parent / "memfit-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "kernel.so").write_text("half")
    hours_ago = time.time() - 7200
    os.utime(old, (hours_ago, hours_ago))
    with _whole_builds.folder_beside(target):
        assert not old.exists()
        assert new.exists()


def test_headers_are_thrown_away_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path))
    for name in ("a.h", "a.h.gch"):
        (tmp_path / name).write_text("half")
    _whole_builds.throw_headers_away.__wrapped__()
    assert [path.name for path in tmp_path.iterdir()] == ["a.h"]


def codecache_build(target: Path, builder: Builder) -> None:
    """Compile as Inductor does, after the compiler was started."""
    _compiler_start.start_compiler().join()
    codecache._worker_compile_cpp(str(target.parent / "lock"), [builder])
