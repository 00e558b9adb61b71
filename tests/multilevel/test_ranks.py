"""Two ranks compute what one computes on the whole batch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_rank import BATCH, METHODS, trained
from safetensors.torch import load_file

from memfit.multilevel import EngineConfig


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).parent / "one_rank.py")
    processes = [
        subprocess.Popen([sys.executable, script, str(folder)], env=common | {"RANK": str(rank)}) for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [load_file(folder / f"rank{rank}.safetensors") for rank in range(2)]


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_equal_one(method: str, ranks: list[dict[str, torch.Tensor]]) -> None:
    for name, value in trained(method, BATCH, distributed=False).items():
        assert torch.equal(ranks[0][name], ranks[1][name])
        assert float((ranks[0][name] - value).abs().max()) <= 1e-6


def test_all_ranks_stop_when_the_first_does(ranks: list[dict[str, torch.Tensor]]) -> None:
    assert int(ranks[0]["stopped"]) == int(ranks[1]["stopped"]) == 3


def test_without_torchrun_one_process_runs(caplog: pytest.LogCaptureFixture) -> None:
    assert EngineConfig(distributed=True).is_distributed
    trained("darts", BATCH, distributed=True)
    assert "running as one" in caplog.text
