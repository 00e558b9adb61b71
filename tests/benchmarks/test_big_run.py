"""The big run at a size that takes seconds: the same processes, the same records."""

import json
import sys

import pytest

from benchmarks import big_run
from benchmarks.big_run_case import BUDGETED, PLAIN, SIZES


@pytest.fixture
def results(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    arguments = ["--size", "small", "--directory", str(tmp_path), "--results", str(path)]
    monkeypatch.setattr(sys, "argv", ["big_run", *arguments])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return path


@pytest.mark.slow
def test_losses_are_the_same_bits_inside_the_limit(results, capfd, monkeypatch) -> None:
    with pytest.raises(SystemExit) as ended:
        big_run.main()
    assert ended.value.code == 0, capfd.readouterr().err
    runs = json.loads(results.read_text())["small"]
    losses = big_run.losses_of(runs[PLAIN])
    assert len(losses) == 5
    assert len(set(losses)) == 5
    assert losses == big_run.losses_of(runs[BUDGETED])
    assert runs[BUDGETED]["predicted_bytes"] <= 32 * 2**20
    assert any("disk tier" in line and "chosen" in line for line in runs[BUDGETED]["choice"])
    last = runs[BUDGETED]["steps"][-1]
    assert last["read_bytes"] == last["write_bytes"] == 2 * 4 * runs[BUDGETED]["parameters"]
    assert last["step_s"] > last["update_s"] > last["wait_s"] > 0

    monkeypatch.setattr(big_run, "run", lambda *_: pytest.fail("what is complete is not run again"))
    with pytest.raises(SystemExit) as ended:
        big_run.main()
    assert ended.value.code == 0


def test_differences_and_a_broken_limit_are_told() -> None:
    step = {"loss": 1.0, "peak_bytes": 1}
    plain = {"steps": [step], "build_bytes": 1, "parameter_digest": "a"}
    other = {"steps": [{"loss": 1.5, "peak_bytes": 2**40}], "build_bytes": 1, "parameter_digest": "b"}
    assert not big_run.problems_of({PLAIN: plain, BUDGETED: plain}, SIZES["small"])
    problems = big_run.problems_of({PLAIN: plain, BUDGETED: other}, SIZES["small"])
    assert [each.split()[0] for each in problems] == ["losses", "parameters", "1.00"]
