import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import memfit
from memfit._kept_kernels import place_of
from memfit.capture import kept_graphs
from memfit.files import cache_folder, write_atomically
from memfit.kept import clear, kept
from memfit.measure.cost import CostCache
from memfit.measure.process import KnownMemory, ProcessCache
from memfit.ops.stretch import digest_of

DAY_S = 24 * 60 * 60


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    return tmp_path


def write(path, *, days: float = 0.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("12345")
    moment = time.time() - days * DAY_S
    os.utime(path, (moment, moment))


def counted(found) -> dict[str, int]:
    return {each.kind: each.files for each in found if each.files}


GRAPH = "graphs/aaa7e5f5cb585204/f3adba567c5ef66b.json"
OTHER_GRAPH = "graphs/aaa7e5f5cb585204/005e3f0e6cf40c27.json"
PLAN = "plans/Net-0123456789abcdef01234567/fedcba9876543210fedcba98.json"


def chained(_: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU())


def test_what_memfit_writes_is_found(folder) -> None:
    memfit.fit(nn.Sequential(*map(chained, range(4))), torch.ones(64, 8), 0.9, remember=True)  # costs and a plan
    ProcessCache().save(KnownMemory())
    graph = symbolic_trace(nn.Identity()).graph
    next(iter(graph.nodes)).meta["val"] = torch.ones(2)
    digest = digest_of(graph)
    for place in (kept_graphs._path(digest), place_of(digest), place_of(f"{digest}_")):
        write(place)
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert counted(kept()) == {
        "costs of operators": 1,
        "memory of processes": 1,
        "graphs of stretches": 1,
        "places of kernels": 2,
        "plans": 1,
    }
    assert len(written) == 6
    assert sum(each.size_bytes for each in kept()) == sum(path.stat().st_size for path in written)


def test_what_killed_writers_left_is_found_when_nobody_can_be_writing_it(folder, monkeypatch) -> None:
    left = []

    def killed(temporary, _path) -> None:
        left.append(temporary)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    monkeypatch.setattr(os, "unlink", lambda _path: None)
    for place in (GRAPH, PLAN, CostCache("cpu").path.name):
        with pytest.raises(KeyboardInterrupt):
            write_atomically(folder / place, "12345")
    monkeypatch.undo()
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(folder))
    assert len(left) == 3
    assert counted(clear()) == {}
    for path in left:
        write(path, days=0.1)
    assert counted(kept()) == counted(clear()) == {"unfinished files": 3}
    assert not any(path.exists() for path in left)


def test_when_it_was_used_is_told(folder) -> None:
    write(folder / PLAN, days=3)
    plans = next(each for each in kept() if each.kind == "plans")
    assert plans.size_bytes == 5
    assert plans.unused_days == pytest.approx(3, abs=0.01)


def test_nothing_is_kept_in_a_folder_that_is_not_there(folder, monkeypatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(folder / "none"))
    assert {each.files for each in (*kept(), *clear())} == {0}
    assert not cache_folder().exists()


def test_all_is_removed_with_the_folders_that_are_empty_then(folder) -> None:
    write(folder / GRAPH)
    write(folder / PLAN)
    write((folder / PLAN).with_name("notes.txt"))
    assert counted(clear()) == {"graphs of stretches": 1, "plans": 1}
    assert not (folder / GRAPH).parent.exists()
    assert [path.name for path in (folder / PLAN).parent.iterdir()] == ["notes.txt"]
    assert counted(kept()) == {}


def test_what_was_used_lately_stays(folder) -> None:
    write(folder / GRAPH, days=31)
    write(folder / OTHER_GRAPH, days=29)
    assert counted(clear(unused_days=30)) == {"graphs of stretches": 1}
    assert not (folder / GRAPH).exists()
    assert (folder / OTHER_GRAPH).exists()


def test_what_another_process_removes_meanwhile_is_not_counted(folder, monkeypatch) -> None:
    write(folder / GRAPH)
    write(folder / OTHER_GRAPH)
    remove = Path.unlink

    def removed_before(path: Path) -> None:
        if path == folder / GRAPH:
            remove(path)
        remove(path)

    monkeypatch.setattr(Path, "unlink", removed_before)
    assert counted(clear()) == {"graphs of stretches": 1}
    assert counted(kept()) == {}


def test_files_of_others_stay(folder, tmp_path_factory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere / "fedcba9876543210fedcba98.json")
    own = (
        "bench_torch-2.13_8-threads.json",
        "settings.json",
        "graphs/loose.json",
        "graphs/train/0001.json",
        "plans/gpt2/half.json",
        "kernels/a/1.so",
    )
    for name in own:
        write(folder / name)
    (folder / "plans/Net-0123456789abcdef01234567").symlink_to(elsewhere)
    (folder / GRAPH).parent.mkdir()
    (folder / GRAPH).symlink_to(elsewhere / "fedcba9876543210fedcba98.json")
    assert counted(kept()) == counted(clear()) == {}
    assert len(list(elsewhere.iterdir())) == 1
    assert all((folder / name).exists() for name in own)
