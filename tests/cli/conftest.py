import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memfit.cli import main

NET = """
import functools
import torch
from torch import nn

print("printed while importing")


class Net(nn.Module):
    def __init__(self, width=8, depth=1, *, bias=True):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(depth)))

    def forward(self, x, scale=None):
        x = self.layers(x)
        return x if scale is None else x * scale


class LooksAtValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]


def make_model(width=8, depth=1):
    return Net(width, depth)


def make_batch():
    return {"x": torch.randn(4, 8), "scale": torch.ones(8)}


def fails():
    raise ValueError("a reason\\nin two lines")


def exits():
    raise SystemExit("enough")


def makes_a_number():
    return 3


half = functools.partial(Net, 4)
built = Net()
number = 3
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with net.py in it; imports and measurements leave no trace outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


@pytest.fixture
def run_memfit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the program as a user does, and say how it ended."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["memfit", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.run()
        captured = capsys.readouterr()
        return Outcome(ended.value.code or 0, captured.out, captured.err)

    return run
