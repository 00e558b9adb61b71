import dataclasses

import pytest
import torch
from command_line import Program, folder_with_net

from memfit.cli import demo, demo_case
from memfit.cli.demo_case import DemoCase
from memfit.cli.progress import display

NET = """
from torch import nn


def make_model(dropout=0.5):
    blocks = [part for _ in range(8) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), *blocks, nn.Dropout(dropout), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
"""

CASE = DemoCase(name="small", package="torch", reference="./small.py:make_model()", batch_size=4, pixels=32, classes=10)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    folder = folder_with_net(tmp_path, monkeypatch)
    (folder / "small.py").write_text(NET)
    return folder


@pytest.fixture
def run_memfit(monkeypatch, capsys):
    return Program(monkeypatch, capsys)


def test_a_model_is_trained_beside_its_eager_twin(monkeypatch, run_memfit, folder):
    monkeypatch.setattr(demo, "CASES", (CASE,))
    outcome = run_memfit("demo", "--steps", "2", "--time-limit", "0", "--folder", "out")
    assert outcome.code == 0, outcome.err
    for words in ("small x4", "budget", "measured peak, eager", "measured slowdown", "equal gradients"):
        assert words in outcome.out
    assert outcome.out.count("yes") == 2
    assert "NO" not in outcome.out
    assert "\x1b" not in outcome.out + outcome.err
    assert "<!DOCTYPE html>" in (folder / "out" / "small.html").read_text()
    again = run_memfit("demo", "--folder", "out")
    assert again.code == 2
    assert "exists; give --force" in again.err


def test_half_of_the_activation_memory_is_less_than_eager_takes():
    with display() as shown:
        result = demo_case.run_case(CASE, steps=1, time_limit_s=0, seed=0, shown=shown)
    assert result.planned_peak_bytes <= result.budget_bytes < result.eager_peak_bytes
    assert abs(result.estimate.peak_bytes / result.eager_peak_bytes - 1) < 0.01
    assert result.kept_promises


def test_other_gradients_are_noticed(monkeypatch):
    model = torch.nn.Linear(2, 2)
    twin = torch.nn.Linear(2, 2)
    for each in (model, twin):
        each(torch.ones(1, 2)).sum().backward()
    assert demo_case._equal_gradients(model, twin)
    twin.weight.grad[0, 0] += 1
    assert not demo_case._equal_gradients(model, twin)


def test_a_broken_promise_is_code_4(monkeypatch, run_memfit):
    monkeypatch.setattr(demo, "CASES", (CASE,))
    monkeypatch.setattr(demo_case, "_equal_gradients", lambda one, other: False)
    outcome = run_memfit("demo", "--steps", "1", "--time-limit", "0", "--folder", "out")
    assert outcome.code == 4
    assert "NO" in outcome.out


def test_what_is_not_installed_is_left_out_and_said(monkeypatch, run_memfit):
    absent = dataclasses.replace(CASE, name="absent", package="no_such_package")
    monkeypatch.setattr(demo, "CASES", (absent,))
    outcome = run_memfit("demo")
    assert outcome.code == 2
    assert "absent is left out: no_such_package is not installed" in outcome.err


def test_an_unknown_model_is_answered_with_those_there_are(run_memfit):
    outcome = run_memfit("demo", "--only", "VGG")
    assert outcome.code == 2
    assert "it has ResNet-50 and GPT-2" in outcome.err
