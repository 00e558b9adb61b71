import io
import json
import sys

import pytest
from command_line import Program, folder_with_net

PLAN = ("plan", "--model", "./net.py:make_model(depth=4)", "--input", "4x8", "--budget", "1GiB", "--time-limit", "1")


@pytest.fixture
def run_memfit(monkeypatch, capsys):
    return Program(monkeypatch, capsys)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, run_memfit):
    folder_with_net(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run_memfit(*PLAN, "--no-measure", "--output", "plan.json").code == 0
    return tmp_path


def test_the_page_is_written_beside_the_plan(run_memfit, folder):
    outcome = run_memfit("report", "plan.json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("plan.html (")
    assert "layers.3" in (folder / "plan.html").read_text()


def test_json_says_what_was_written(run_memfit, folder):
    answer = json.loads(run_memfit("report", "plan.json", "--output", "page.html", "--json").out)
    assert answer == {"report": "page.html", "size_bytes": (folder / "page.html").stat().st_size}


def test_nothing_is_written_over_without_force(run_memfit, folder):
    (folder / "plan.html").write_text("mine")
    outcome = run_memfit("report", "plan.json")
    assert (outcome.code, (folder / "plan.html").read_text()) == (2, "mine")
    assert "is there already and was left as it is" in outcome.err
    assert run_memfit("report", "plan.json", "--force").code == 0
    assert (folder / "plan.html").read_text() != "mine"


@pytest.mark.parametrize(("answer", "code", "is_kept"), [("n\n", 2, True), ("y\n", 0, False)])
def test_on_a_terminal_it_asks(run_memfit, folder, monkeypatch, answer, code, is_kept):
    (folder / "plan.html").write_text("mine")
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert run_memfit("report", "plan.json").code == code
    assert ((folder / "plan.html").read_text() == "mine") is is_kept


def test_a_damaged_plan_is_refused_and_nothing_is_written(run_memfit, folder):
    (folder / "plan.json").write_text((folder / "plan.json").read_text().replace('"Net"', '"Ned"'))
    outcome = run_memfit("report", "plan.json")
    assert outcome.code == 2
    assert "checksum differs" in outcome.err
    assert not (folder / "plan.html").exists()


def test_a_plan_that_is_not_there_is_said(run_memfit):
    outcome = run_memfit("report", "nothing.json")
    assert outcome.code == 2
    assert "nothing.json" in outcome.err


def test_a_picture_takes_its_format_from_its_name(run_memfit, folder):
    pytest.importorskip("matplotlib")
    assert run_memfit("report", "plan.json", "--output", "timeline.svg").code == 0
    assert "<svg" in (folder / "timeline.svg").read_text()
