import json

import pytest
from command_line import Program, folder_with_net

from memfit.cli.frontier import parse_fractions
from memfit.errors import InvalidInput


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return folder_with_net(tmp_path, monkeypatch)


@pytest.fixture
def run_memfit(monkeypatch, capsys):
    return Program(monkeypatch, capsys)


NET = ("frontier", "--model", "./net.py:make_model(64, 8)", "--input", "512x64", "--optimizer", "sgd")
FEW = (*NET, "--fractions", "0.8,0.6", "--time-limit", "3")


def test_the_curve_is_printed_line_by_line(run_memfit):
    outcome = run_memfit(*FEW)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0] == "Net, training step with sgd, on cpu"
    points = [line for line in lines if line.rstrip().endswith(" s")]
    assert len(points) == 3


def test_the_curve_is_written(run_memfit, folder):
    outcome = run_memfit(*FEW, "--output", "curve.json", "--json")
    written = json.loads((folder / "curve.json").read_text())
    assert json.loads(outcome.out) == written
    slowdowns = [point["slowdown"] for point in written["points"]]
    assert slowdowns == sorted(slowdowns)


def test_a_device_is_planned_for_by_estimated_times(run_memfit):
    outcome = run_memfit(*FEW, "--device", "T4")
    assert "on T4" in outcome.out
    assert outcome.out.splitlines()[-1] == "note: times are estimated, not measured"


@pytest.mark.parametrize("text", ["", "a", "0.5,", "0.5;0.6", "0", "1.5", "-0.1", "nan", "0.5,inf"])
def test_what_are_no_fractions_is_refused(run_memfit, text):
    with pytest.raises(InvalidInput, match=r"0\.8,0\.6,0\.4"):
        parse_fractions(text)
    outcome = run_memfit(*NET, "--fractions", text)
    assert (outcome.code, outcome.out) == (2, "")
    assert "--fractions" in outcome.err
