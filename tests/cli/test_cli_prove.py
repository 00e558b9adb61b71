import json

import pytest
from command_line import Program, folder_with_net

from memfit.execute.compiled import CompiledCall
from memfit.prove import profile as profiling


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return folder_with_net(tmp_path, monkeypatch)


@pytest.fixture
def run_memfit(monkeypatch, capsys):
    return Program(monkeypatch, capsys)


NET = ("--model", "./net.py:make_model(64, 8)", "--input", "512x64", "--optimizer", "sgd")


@pytest.fixture
def plan_file(run_memfit, folder):
    assert run_memfit("plan", *NET, "--budget", "0.8", "--output", "plan.json").code == 0
    return str(folder / "plan.json")


def test_a_plan_of_a_file_is_checked(run_memfit, plan_file):
    outcome = run_memfit("check", *NET, "--plan", plan_file)
    assert outcome.code == 0
    assert "EQUAL bit for bit" in outcome.out
    assert "gradients" in outcome.out


def test_a_budget_is_planned_for_first(run_memfit):
    answer = json.loads(run_memfit("check", *NET, "--budget", "0.8", "--json").out)
    assert answer["passed"] is True


def test_a_planned_step_that_is_wrong_is_code_4(run_memfit, plan_file, monkeypatch):
    run = CompiledCall.__call__
    monkeypatch.setattr(CompiledCall, "__call__", lambda *arguments: run(*arguments) * 1.01)
    outcome = run_memfit("check", *NET, "--plan", plan_file)
    assert outcome.code == 4
    assert "DIFFERENT" in outcome.out
    assert run_memfit("check", *NET, "--plan", plan_file, "--tolerance", "0.1").code == 0


def test_a_plan_of_a_file_is_profiled(run_memfit, plan_file):
    outcome = run_memfit("profile", *NET, "--plan", plan_file, "--pairs", "2")
    assert outcome.code == 0
    for words in ("planned", "predicted", "eager", "WITHIN the budget"):
        assert words in outcome.out


def test_steps_are_profiled_without_eager(run_memfit):
    outcome = run_memfit("profile", *NET, "--budget", "0.8", "--pairs", "1", "--no-eager", "--json")
    answer = json.loads(outcome.out)
    assert answer["eager_peak_bytes"] is None
    assert answer["slowdown"] is None
    assert answer["fits"] is True


def test_a_peak_over_the_budget_is_code_4(run_memfit, plan_file, monkeypatch):
    monkeypatch.setattr(profiling, "_peak", lambda *_: 10**9)
    outcome = run_memfit("profile", *NET, "--plan", plan_file, "--pairs", "1")
    assert outcome.code == 4
    assert "OVER the budget" in outcome.out


@pytest.mark.parametrize("command", ["check", "profile"])
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((*NET,), "there is no plan"),
        ((*NET, "--plan", "net.py", "--budget", "0.5"), "both --plan and --budget"),
        ((*NET, "--plan", "no_such.json"), "no_such.json"),
        ((*NET, "--plan", "net.py"), "not a plan"),
        ((*NET, "--budget", "much"), "'much'"),
        ((*NET, "--budget", "0.8", "--allow", "magic"), "unknown technique"),
        (("--model", "./net.py:make_model(64, 8)", "--budget", "0.8"), "there is no sample"),
    ],
)
def test_bad_input_is_one_paragraph_and_code_2(run_memfit, command, arguments, complaint):
    outcome = run_memfit(command, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert complaint in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("command", ["check", "profile"])
def test_a_plan_of_another_model_or_shape_is_code_2(run_memfit, plan_file, command):
    other = run_memfit(command, "--model", "./net.py:make_model(64, 7)", "--input", "512x64", "--plan", plan_file)
    assert other.code == 2
    assert "other parameters or buffers" in other.err
    shape = run_memfit(command, "--model", "./net.py:make_model(64, 8)", "--input", "9x64", "--plan", plan_file)
    assert shape.code == 2
    assert "the sample is float32[9, 64]" in shape.err


@pytest.mark.parametrize("command", ["check", "profile"])
def test_an_infeasible_budget_is_code_3(run_memfit, command):
    assert run_memfit(command, *NET, "--budget", "10KB").code == 3


def test_a_model_that_does_not_fit_here_is_refused(run_memfit):
    huge = ("--model", "torch.nn.Linear(2_000_000, 2_000_000)", "--input", "1x2000000", "--budget", "0.8")
    outcome = run_memfit("check", *huge)
    assert outcome.code == 2
    assert "too much for what is free here" in outcome.err
