"""A run that loses a rank ends, and goes on exactly."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from killed_job import TIMEOUT_S
from launching import run, started
from safetensors.torch import load_file
from torch import nn

import memfit
from memfit import distributed
from memfit.distributed.resume import _all_could_read, _newest_of_all
from memfit.tensors import same_bits

resume_module = sys.modules["memfit.distributed.resume"]  # whose name the function has, too


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_the_run_goes_on_exactly(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run("killed_job.py", whole, 8, -1)

    processes = started("killed_job.py", broken, 8, 5)
    try:
        processes[1].communicate(timeout=60)
        killed_s = time.monotonic()
        _, errors = processes[0].communicate(timeout=60)
        waited_s = time.monotonic() - killed_s
    finally:
        for process in processes:
            process.kill()
    assert processes[1].returncode == -9
    assert processes[0].returncode not in (0, -9)
    assert "Error" in errors
    assert waited_s < TIMEOUT_S + 5

    assert "from 4" in run("killed_job.py", broken, 8, -1)[0]  # the newest that both have
    for rank in range(2):
        expected, found = (load_file(folder / f"end{rank}.safetensors") for folder in (whole, broken))
        assert all(same_bits(found[name], expected[name]) for name in expected)


def make_step() -> memfit.Step:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return memfit.Step(model, optimizer, lambda model, batch: model(batch).square().mean())


def test_one_process_goes_on_from_its_newest_of_two(tmp_path: Path) -> None:
    step = make_step()
    assert distributed.resume(step, tmp_path) == 0
    for _ in range(4):
        step(torch.ones(3, 4))
        path = distributed.save(step, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    path.write_bytes(path.read_bytes()[:100])  # damaged: said, not skipped
    with pytest.raises(memfit.InvalidFile):
        distributed.resume(make_step(), tmp_path)
    path.unlink()
    other = make_step()
    assert distributed.resume(other, tmp_path) == other.position.batches == 3


def test_ranks_go_on_from_what_all_of_them_have() -> None:
    assert _newest_of_all([words(3, 4), words(4, 5)]) == "4"
    assert _newest_of_all([words(), words()]) == "0"
    with pytest.raises(memfit.InvalidFile, match="rank 1 has none"):
        _newest_of_all([words(3), words()])
    with pytest.raises(memfit.InvalidFile, match="a run of 4 ranks, this one has 2"):
        _newest_of_all([words(sizes=[4]), words(sizes=[])])


def words(*numbers: int, sizes: Sequence[int] = (2,)) -> str:
    return json.dumps({"own": numbers, "sizes": list(sizes) if numbers or sizes != (2,) else []})


def test_where_one_rank_cannot_read_all_raise() -> None:
    assert _all_could_read(["", ""]) == ""
    with pytest.raises(memfit.InvalidFile, match="rank 1: damaged"):
        _all_could_read(["", "damaged"])


def test_a_directory_of_another_run_is_left_alone(tmp_path: Path) -> None:
    earlier = make_step()
    for _ in range(3):
        earlier(torch.ones(3, 4))
    distributed.save(earlier, tmp_path)
    anew = make_step()
    anew(torch.ones(3, 4))
    with pytest.raises(memfit.InvalidFile, match="after 3 batches, this run has done 1"):
        distributed.save(anew, tmp_path)
    assert distributed.resume(anew, tmp_path) == 3


def test_what_not_all_ranks_have_is_removed_when_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step()
    for _ in range(2):
        step(torch.ones(3, 4))
        distributed.save(step, tmp_path)
    monkeypatch.setattr(resume_module, "_newest_of_all", lambda _: "1")
    again = make_step()
    assert distributed.resume(again, tmp_path) == again.position.batches == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001.rank0of1.safetensors"]
    again(torch.ones(3, 4))
    distributed.save(again, tmp_path)


def test_checkpoints_of_more_ranks_are_not_overlooked(tmp_path: Path) -> None:
    (tmp_path / "step-000000004.rank0of4.safetensors").touch()
    with pytest.raises(memfit.InvalidFile, match="a run of 4 ranks, this one has 1"):
        distributed.resume(make_step(), tmp_path)
