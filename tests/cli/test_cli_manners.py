"""What all commands have in common: nearest names, files that exist, plain text, interrupts, completion."""

import json
import sys

import pytest
from command_line import Program, folder_with_net

import memfit
from memfit.cli import options, streams
from memfit.errors import InvalidInput
from memfit.plan import solve
from memfit.prove import profile as profiling


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return folder_with_net(tmp_path, monkeypatch)


@pytest.fixture
def run_memfit(monkeypatch, capsys):
    return Program(monkeypatch, capsys)


STEP = ("--model", "./net.py:make_model(64, 8)", "--input", "512x64")
VERBS = ("estimate", "plan", "profile", "check", "frontier", "report", "doctor", "zoo", "demo")


def test_the_help_names_every_verb_the_codes_and_examples(run_memfit):
    outcome = run_memfit("--help")
    for words in (*VERBS, "Exit codes", "130", "Examples", "--install-completion"):
        assert words in outcome.out, words


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_examples_and_codes(run_memfit, verb):
    outcome = run_memfit(verb, "--help")
    assert outcome.code == 0
    assert "Examples" in outcome.out
    assert "Exit codes" in outcome.out
    assert f"memfit {verb}" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("estmate",), "estimate"),
        (("frontire",), "frontier"),
        (("plan", "--modle", "x"), "--model"),
        (("plan", *STEP, "--budget", "0.8", "--optimizer", "adamww"), "adamw"),
        (("plan", *STEP, "--budget", "0.8", "--allow", "recompute,leen"), "lean"),
        (("plan", *STEP, "--budget", "0.8", "--device", "A100-4OGB"), "A100-40GB"),
        (("estimate", *STEP, "--device", "H10O-80GB"), "H100-80GB"),
        (("estimate", "--model", "torhc.nn.Linear(2, 2)", "--input", "1x2"), "torch"),
        (("estimate", "--model", "torch.nn.Linaer(2, 2)", "--input", "1x2"), "Linear"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(run_memfit, arguments, meant):
    outcome = run_memfit(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert meant in outcome.err.split("known are")[0].rpartition("Error:")[2]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("estimate", *STEP, "--no-measure"), "--html"),
        (("plan", *STEP, "--budget", "0.8", "--no-measure", "--time-limit", "1"), "--output"),
        (("frontier", *STEP, "--fractions", "0.8", "--no-measure", "--time-limit", "1"), "--output"),
    ],
)
def test_a_file_that_exists_is_kept_unless_forced(run_memfit, folder, arguments, option):
    (folder / "out").write_text("precious")
    refused = run_memfit(*arguments, option, "out")
    assert (refused.code, refused.out) == (2, "")
    assert "exists; give --force" in refused.err
    assert (folder / "out").read_text() == "precious"
    assert run_memfit(*arguments, option, "out", "--force").code == 0
    assert (folder / "out").read_text() != "precious"


def test_on_a_terminal_it_is_asked_before_a_file_is_written_over(folder, monkeypatch):
    asked = []
    path = folder / "out"
    path.write_text("precious")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(streams.typer, "confirm", lambda text, **_: asked.append(text) or True)
    streams.check_writable(path, force=False, option="--output")
    streams.check_writable(path, force=True, option="--output")
    streams.check_writable(folder / "other", force=False, option="--output")
    assert len(asked) == 1
    with pytest.raises(InvalidInput):
        streams.check_writable(folder, force=False, option="--output")
    monkeypatch.setattr(streams.typer, "confirm", lambda *_, **__: False)
    with pytest.raises(InvalidInput, match="exists"):  # exit code 2; 1 would say that it does not fit
        streams.check_writable(path, force=False, option="--output")


def test_how_ranks_divide_a_model_needs_ranks(run_memfit):
    for extra in (("--shard", "fsdp"), ("--bucket-views",)):
        outcome = run_memfit("estimate", *STEP, "--no-measure", *extra)
        assert outcome.code == 2
        assert "--world-size" in outcome.err


def test_not_on_a_terminal_all_is_plain_text(run_memfit, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for arguments in (
        ("plan", *STEP, "--budget", "0.8", "--no-measure", "--time-limit", "1"),
        ("estimate", *STEP, "--no-measure"),
        ("zoo", "list"),
        ("plan", *STEP, "--budget", "1B", "--no-measure"),
    ):
        outcome = run_memfit(*arguments)
        assert "\x1b" not in outcome.out + outcome.err
        assert "\r" not in outcome.out + outcome.err


def test_an_interrupt_leaves_the_part_of_the_curve_that_was_found(run_memfit, monkeypatch, folder):
    searched = []
    own = solve._Search._search

    def interrupted_at_the_second(search):
        searched.append(search)
        own(search)
        if len(searched) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(solve._Search, "_search", interrupted_at_the_second)
    outcome = run_memfit("frontier", *STEP, "--fractions", "0.9,0.8,0.7", "--no-measure", "--output", "curve.json")
    assert outcome.code == 0
    assert len(json.loads((folder / "curve.json").read_text())["points"]) == 2
    assert "2 of 4 budgets have a plan, the search was interrupted" in outcome.err
    assert len(searched) == 2


def test_an_interrupt_ends_the_search_for_the_smallest_plan_at_once(run_memfit, monkeypatch):
    searched = []
    own = solve._Search._search

    def interrupted(search):
        searched.append(search)
        own(search)
        raise KeyboardInterrupt

    monkeypatch.setattr(solve._Search, "_search", interrupted)
    outcome = run_memfit("plan", *STEP, "--budget", "smallest", "--no-measure")
    assert outcome.code == 0
    assert "the search was interrupted" in outcome.out
    assert len(searched) <= 2


def test_an_interrupt_leaves_the_pairs_that_were_measured(run_memfit, monkeypatch):
    ran = []
    own = profiling._pair

    def interrupted_at_the_third(*args, **options):
        ran.append(args)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return own(*args, **options)

    monkeypatch.setattr(profiling, "_pair", interrupted_at_the_third)
    answer = json.loads(run_memfit("profile", *STEP, "--budget", "0.9", "--pairs", "9", "--json").out)
    assert answer["pairs"] == 2


def test_shells_are_offered_names():
    assert options.completing(["T4", "L4"])("t") == ["T4"]
    assert options._complete_techniques("recompute,l") == ["recompute,lean"]


def test_completion_is_offered_for_options(run_memfit, monkeypatch):
    monkeypatch.setenv("_MEMFIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "memfit plan --device A100")
    monkeypatch.setenv("COMP_CWORD", "3")
    offered = run_memfit("plan").out.split()
    assert offered == ["A100-40GB", "A100-80GB"]


def test_a_stored_plan_of_a_file_still_loads(run_memfit, folder):
    assert run_memfit("plan", *STEP, "--budget", "0.9", "--output", "plan.json", "--time-limit", "1").code == 0
    assert memfit.Plan.load(folder / "plan.json").budget_bytes
    assert run_memfit("check", *STEP, "--plan", "plan.json").code == 0
