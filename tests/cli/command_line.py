"""A model to name on the command line, and the program to name it to."""

import dataclasses
import sys
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
        self.rates = [rate.item() for rate in torch.randn(3)]


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
    """How a run ended."""

    code: int
    out: str
    err: str


def folder_with_net(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with net.py in it; imports and measurements leave no trace outside."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "net.py").write_text(NET)
    return folder


@dataclasses.dataclass(frozen=True)
class Program:
    """Memfit as a user runs it."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> Outcome:
        self.monkeypatch.setattr(sys, "argv", ["memfit", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.run()
        captured = self.capsys.readouterr()
        return Outcome(ended.value.code or 0, captured.out, captured.err)
