"""The commands for a model that is planned by regions."""

import pytest
from command_line import Program, folder_with_net

ASKING = """
import torch
from torch import nn


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(layer() for _ in range(4))) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.mean() > 100.0:
                break
        return x.square().mean()


def layer():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1))
"""

NET = ("--model", "./asking.py:Asking", "--input", "512x64", "--optimizer", "sgd")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "asking.py").write_text(ASKING)
    return folder_with_net(tmp_path, monkeypatch)


def test_a_model_in_regions_is_planned_checked_and_profiled(monkeypatch, capsys):
    run_memfit = Program(monkeypatch, capsys)
    made = run_memfit("plan", *NET, "--budget", "0.7", "--output", "plan.json", "--time-limit", "1")
    assert made.code == 0
    assert "planned by regions: blocks.0, blocks.1" in " ".join(made.out.split())
    assert "left eager: the model itself" in " ".join(made.out.split())
    checked = run_memfit("check", *NET, "--plan", "plan.json")
    assert (checked.code, "EQUAL bit for bit" in checked.out) == (0, True)
    profiled = run_memfit("profile", *NET, "--plan", "plan.json", "--pairs", "1")
    assert profiled.code == 0
    assert run_memfit("plan", *NET, "--budget", "0.01", "--time-limit", "1").code == 3


def test_the_summary_for_machines_names_regions(monkeypatch, capsys):
    import json

    outcome = Program(monkeypatch, capsys)("plan", *NET, "--budget", "0.7", "--json", "--time-limit", "1")
    summary = json.loads(outcome.out)
    assert list(summary["regions"]) == ["blocks.0", "blocks.1"]
    assert "could not be captured" in summary["left_eager"][""]
