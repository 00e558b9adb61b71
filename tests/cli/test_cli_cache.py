import json

import pytest
from command_line import Program

from memfit.measure.cost import CostCache, OperatorCost


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    CostCache("cpu").save({"one": OperatorCost(workspace_bytes=1, output_bytes=(2,))})
    return tmp_path


@pytest.fixture
def run_memfit(monkeypatch, capsys):
    return Program(monkeypatch, capsys)


def test_what_is_kept_is_shown_and_stays(run_memfit, folder):
    outcome = run_memfit("cache")
    assert outcome.code == 0
    assert "costs of operators" in outcome.out
    assert "today" in outcome.out
    assert list(folder.iterdir())


def test_it_is_removed(run_memfit, folder):
    assert "costs of operators" in run_memfit("cache", "--clear", "--unused-for", "1").out
    assert list(folder.iterdir())
    removed = json.loads(run_memfit("cache", "--clear", "--json").out)
    assert removed["folder"] == str(folder)
    assert removed["removed"] is True
    assert {each["kind"]: each["files"] for each in removed["kinds"]}["costs of operators"] == 1
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("--unused-for", "3"), "give both"), (("--clear", "--unused-for", "-1"), "a number of days, -1 was given")],
)
def test_options_that_mean_nothing_are_refused(run_memfit, folder, arguments, word):
    outcome = run_memfit("cache", *arguments)
    assert outcome.code == 2
    assert word in outcome.err
    assert list(folder.iterdir())


def test_what_cannot_be_removed_is_said(run_memfit, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError("read-only")

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    outcome = run_memfit("cache", "--clear")
    assert outcome.code == 2
    assert "read-only" in outcome.err
