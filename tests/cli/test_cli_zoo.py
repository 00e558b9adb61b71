import json

import pytest
from command_line import Program, folder_with_net

import memfit
from memfit import zoo
from memfit.cli import zoo as commands
from memfit.zoo import Verdict


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return folder_with_net(tmp_path, monkeypatch)


@pytest.fixture
def run_memfit(monkeypatch, capsys):
    return Program(monkeypatch, capsys)


NAME = "resnet50-x16-cpu-0.50"


def test_plans_are_listed_with_what_is_estimated_marked(run_memfit):
    outcome = run_memfit("zoo", "list", "resnet50")
    assert outcome.code == 0
    assert NAME in outcome.out
    assert "vgg16" not in outcome.out
    assert "* times are estimated" in outcome.out
    assert "estimated" not in run_memfit("zoo", "list", "--device", "cpu").out


def test_the_list_for_machines(run_memfit):
    listed = json.loads(run_memfit("zoo", "list", "--device", "t4", "--json").out)
    assert {each["device"] for each in listed} == {"T4"}
    assert {each["times_measured"] for each in listed} == {False}


def test_a_plan_is_shown_and_written(run_memfit, folder):
    outcome = run_memfit("zoo", "show", NAME, "--output", "plan.json")
    assert outcome.code == 0
    assert "ResNet, training step with sgd, on cpu" in outcome.out
    assert 'step: --model "torchvision.models.resnet50()" --input 16x3x128x128' in outcome.out
    assert memfit.Plan.load(folder / "plan.json") == zoo.open_plan(NAME)
    again = run_memfit("zoo", "show", NAME, "--output", "plan.json")
    assert again.code == 2
    assert "exists; give --force" in again.err
    assert run_memfit("zoo", "show", NAME, "--output", "plan.json", "--force", "--json").code == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("list", "resnet5"), "did you mean resnet50"),
        (("list", "--device", "A100-40G8"), "did you mean A100-40GB"),
        (("show", "resnet50-x16-cpu-0.55"), "did you mean resnet50-x16-cpu-0.50"),
        (("verify", "resnet50-x16-cpu-0.55"), "did you mean resnet50-x16-cpu-0.50"),
        (("build", ".", "--only", "resnet5"), "did you mean resnet50"),
        (("lst",), "Did you mean 'list'"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(run_memfit, arguments, complaint):
    outcome = run_memfit("zoo", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert complaint in outcome.err


def test_stored_plans_are_named_where_a_plan_is_wanted(run_memfit):
    step = ("--model", "./net.py:make_model", "--input", "4x8")
    unknown = run_memfit("check", *step, "--plan", "zoo:resnet50-x16-cpu-0.55")
    assert unknown.code == 2
    assert "did you mean resnet50-x16-cpu-0.50" in unknown.err
    of_another_model = run_memfit("check", *step, "--plan", f"zoo:{NAME}")
    assert of_another_model.code == 2
    assert "the plan was made for a ResNet" in of_another_model.err


def test_a_plan_file_that_is_not_there_is_answered_with_the_nearest(run_memfit, folder):
    (folder / "plan.json").write_text("{}")
    outcome = run_memfit("check", "--model", "./net.py:make_model", "--input", "4x8", "--plan", "plna.json")
    assert outcome.code == 2
    assert "there is no file 'plna.json' (did you mean plan.json?)" in outcome.err


def verdict(name, reason=""):
    return Verdict(name=name, reason=reason, peak_bytes=None, seconds=0.1)


@pytest.mark.parametrize(("reason", "code"), [("", 0), ("its peak is another", 4)])
def test_verify_says_what_does_not_hold(run_memfit, monkeypatch, reason, code):
    monkeypatch.setattr(commands.zoo, "verify", lambda wanted, make: (verdict(each.name, reason) for each in wanted))
    outcome = run_memfit("zoo", "verify", NAME)
    assert outcome.code == code
    assert (reason in outcome.out) is True
    assert "1 of 1 plans checked" in outcome.out


def test_an_interrupt_leaves_what_was_verified(run_memfit, monkeypatch):
    def interrupted(wanted, make):
        yield verdict(wanted[0].name)
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.zoo, "verify", interrupted)
    outcome = run_memfit("zoo", "verify", "--json")
    assert outcome.code == 130
    assert len(json.loads(outcome.out)) == 1
    assert "interrupted: 1 of" in outcome.err
