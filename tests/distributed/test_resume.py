"""A run that loses a rank ends, and goes on exactly."""

import time
from pathlib import Path

import pytest
import torch
from killed_job import TIMEOUT_S
from launching import run, started
from safetensors.torch import load_file
from torch import nn

import memfit
from memfit import distributed
from memfit.distributed.resume import _newest_of_all
from memfit.tensors import same_bits


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
    assert _newest_of_all(["[3, 4]", "[4, 5]"]) == "4"
    assert _newest_of_all(["[]", "[]"]) == "0"
    with pytest.raises(memfit.InvalidFile, match="rank 1 has none"):
        _newest_of_all(["[3]", "[]"])
