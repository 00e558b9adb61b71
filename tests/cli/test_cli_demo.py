import dataclasses
import json

import pytest
import torch
from command_line import Program, folder_with_net

from memfit.cli import demo, demo_case, demo_limit
from memfit.cli.demo_case import DemoCase
from memfit.cli.demo_limit import LimitCase
from memfit.cli.demo_process import Tagger, Task, Trained
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

TAGGER = Tagger(words=64, width=64, heads=2, layers=2, classes=4, batch_size=16, tokens=128)
LIMITED = LimitCase(name="tagger", model=TAGGER)


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
    outcome = run_memfit("demo", "--only", "small", "--steps", "2", "--time-limit", "0", "--folder", "out")
    assert outcome.code == 0, outcome.err
    for words in ("small x4", "budget", "measured peak, eager", "measured slowdown", "equal gradients"):
        assert words in outcome.out
    assert outcome.out.count("yes") == 2
    assert "NO" not in outcome.out
    assert "\x1b" not in outcome.out + outcome.err
    assert "<!DOCTYPE html>" in (folder / "out" / "small.html").read_text()
    again = run_memfit("demo", "--only", "small", "--folder", "out")
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
    outcome = run_memfit("demo", "--only", "small", "--steps", "1", "--time-limit", "0", "--folder", "out")
    assert outcome.code == 4
    assert "NO" in outcome.out


def test_what_is_not_installed_is_left_out_and_said(monkeypatch, run_memfit):
    absent = dataclasses.replace(CASE, name="absent", package="no_such_package")
    monkeypatch.setattr(demo, "CASES", (absent,))
    monkeypatch.setattr(demo_limit, "can_be_measured", lambda device: False)
    outcome = run_memfit("demo")
    assert outcome.code == 2
    assert "Transformer is left out: a hard limit of a process needs Linux" in outcome.err
    assert "absent is left out: no_such_package is not installed" in outcome.err


def test_an_unknown_model_is_answered_with_those_there_are(run_memfit):
    outcome = run_memfit("demo", "--only", "VGG")
    assert outcome.code == 2
    assert "it has Transformer, ResNet-50 and GPT-2" in outcome.err


needs_a_limit = pytest.mark.skipif(bool(LIMITED.missing), reason="hard limits of a process need Linux with glibc")


@pytest.mark.slow
@needs_a_limit
def test_memfit_trains_in_a_limit_in_which_pytorch_fails(monkeypatch, run_memfit, folder):
    monkeypatch.setattr(demo, "LIMITED", LIMITED)
    monkeypatch.setattr(demo, "CASES", ())
    outcome = run_memfit("demo", "--steps", "2", "--time-limit", "1", "--folder", "out")
    assert outcome.code == 0, outcome.out + outcome.err
    assert "tagger x16 under a hard limit" in outcome.out
    assert "DefaultCPUAllocator: can't allocate memory" in outcome.out
    assert "NO" not in outcome.out
    figures = json.loads((folder / "out" / "tagger.json").read_text())
    assert figures["kept_promises"]
    assert figures["plain"]["failure"]
    assert figures["planned"]["losses"] == figures["unlimited"]["losses"]
    assert len(figures["planned"]["losses"]) == 2


@needs_a_limit
def test_the_limit_is_what_makes_pytorch_fail():
    task = Task(model=TAGGER, steps=1, seed=0, releases=True)
    within = demo_limit._in_process(dataclasses.replace(task, limit_bytes=2**30))
    assert not within.failure
    assert 0 < within.peak_bytes < 2**30
    beyond = demo_limit._in_process(dataclasses.replace(task, limit_bytes=within.peak_bytes // 2))
    assert "can't allocate memory" in beyond.failure
    assert beyond.losses == ()


FINE = Trained(losses=(2.0, 1.0), weights="a", step_s=(1.0, 1.0), planning_s=1.0, peak_bytes=2**20)
FAILED = Trained(failure="RuntimeError: can't allocate memory")


@pytest.mark.parametrize(
    ("plain", "planned", "is_kept"),
    [
        (FAILED, FINE, True),
        (FINE, FINE, False),  # the limit shows nothing
        (FAILED, FAILED, False),
        (FAILED, dataclasses.replace(FINE, losses=(2.0, 1.5)), False),
        (FAILED, dataclasses.replace(FINE, weights="b"), False),
    ],
)
def test_what_the_limit_promises(monkeypatch, run_memfit, plain, planned, is_kept):
    def in_process(task):
        if task.limit_bytes is None:
            return FINE
        return plain if task.budget_bytes is None else planned

    monkeypatch.setattr(demo, "LIMITED", LIMITED)
    monkeypatch.setattr(demo_limit, "can_be_measured", lambda device: True)
    monkeypatch.setattr(demo_limit, "choose_limit", lambda case, seed: (2**20, 2**22, 2**21))
    monkeypatch.setattr(demo_limit, "_in_process", in_process)
    outcome = run_memfit("demo", "--only", "tagger")
    assert outcome.code == (0 if is_kept else 4)
    assert ("NO" in outcome.out) is not is_kept
