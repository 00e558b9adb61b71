import json

import pytest
import torch
from command_line import Program, folder_with_net

import memfit
from memfit import api
from memfit.cli import reference as references
from memfit.errors import InfeasibleBudget
from memfit.plan import solve


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return folder_with_net(tmp_path, monkeypatch)


@pytest.fixture
def run_memfit(monkeypatch, capsys):
    return Program(monkeypatch, capsys)


NET = ("plan", "--model", "./net.py:make_model(64, 8)")
WITH_INPUT = (*NET, "--input", "512x64", "--optimizer", "sgd")


def test_a_plan_is_printed_as_a_table(run_memfit):
    outcome = run_memfit(*WITH_INPUT, "--budget", "0.8")
    assert (outcome.code, outcome.err.count("Traceback")) == (0, 0)
    for words in (
        "Net, training step with sgd, on cpu",
        "Sample float32[512, 64]",
        *(
            "budget",
            "predicted peak",
            "unplanned peak",
            "floor",
            "predicted slowdown",
            "lower bound",
            "gap",
            "plan time",
        ),
        "times measured here",
        "computed again",
        "layers.",
    ):
        assert words in outcome.out, words
    assert "printed while importing" not in outcome.out


def test_a_plan_is_written_and_can_be_applied(run_memfit, folder):
    outcome = run_memfit(*WITH_INPUT, "--budget", "0.8", "--output", "new/plan.json", "--json")
    plan = memfit.Plan.load(folder / "new" / "plan.json")
    answer = json.loads(outcome.out)
    assert answer["peak_bytes"] == plan.peak_bytes <= plan.budget_bytes == answer["budget_bytes"]
    assert answer["slowdown"] == plan.slowdown
    assert answer["optimizer"] == "sgd"
    make_model = references.load(references.parse("./net.py:make_model", memfit.InvalidModel))
    model = memfit.apply(plan, make_model(64, 8), torch.randn(512, 64))
    assert memfit.plan_of(model) == plan


@pytest.mark.parametrize(
    ("budget", "expected_bytes"), [("2MiB", 2 * 2**20), ("2MB", 2_000_000), ("2000000", 2_000_000)]
)
def test_budgets_in_bytes(run_memfit, budget, expected_bytes):
    assert json.loads(run_memfit(*WITH_INPUT, "--budget", budget, "--json").out)["budget_bytes"] == expected_bytes


def test_the_smallest_budget(run_memfit):
    answer = json.loads(run_memfit(*WITH_INPUT, "--budget", "smallest", "--json").out)
    assert answer["floor_bytes"] <= answer["budget_bytes"] < answer["unplanned_peak_bytes"]


def test_a_budget_above_the_peak_is_said_to_need_no_plan(run_memfit):
    outcome = run_memfit(*WITH_INPUT, "--budget", "1GiB")
    assert outcome.code == 0
    assert "the unplanned step fits the budget" in outcome.out


def test_a_budget_below_the_floor_is_code_3_and_one_line(run_memfit, folder):
    outcome = run_memfit(*WITH_INPUT, "--budget", "10KB", "--output", "plan.json")
    assert outcome.code == 3
    assert outcome.out == ""
    assert outcome.err.splitlines()[-1].startswith("error: no plan of 9.77 KiB was found: the smallest")
    assert not (folder / "plan.json").exists()


def test_a_device_is_planned_for_without_weights_and_its_memory_is_the_budget(run_memfit):
    huge = ("plan", "--model", "./net.py:make_model(20000, 30)", "--input", "8192x20000", "--time-limit", "1")
    answer = json.loads(
        run_memfit(*huge, "--device", "h200", "--optimizer", "sgd", "--dtype", "bfloat16", "--json").out
    )
    assert answer["device"] == "H200"
    assert answer["times_measured"] is False
    assert answer["peak_bytes"] <= answer["budget_bytes"] < 141 * 2**30
    assert answer["peak_bytes"] > 24 * 2**30


def test_without_measuring_nothing_is_built(run_memfit):
    outcome = run_memfit(*WITH_INPUT, "--budget", "0.8", "--no-measure")
    assert "times estimated" in outcome.out


def test_techniques_and_modules_are_chosen(run_memfit):
    answer = json.loads(run_memfit(*WITH_INPUT, "--recompute", "nn.Linear", "--allow", "recompute", "--json").out)
    assert answer["allow"] == ["recompute"]
    assert answer["budget_bytes"] is None
    assert answer["activations"]["kept"] == 0
    kept = json.loads(run_memfit(*WITH_INPUT, "--budget", "1.0", "--keep", "layers.*", "--json").out)
    assert kept["activations"]["computed again"] == 0


def test_the_loss_alone_is_an_option_for_models_that_return_one(run_memfit, folder):
    (folder / "lossy.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass WithLoss(nn.Linear):\n"
        "    def forward(self, x):\n        y = super().forward(x)\n"
        "        return {'loss': y.square().mean(), 'y': y}\n"
    )
    arguments = ("plan", "--model", "./lossy.py:WithLoss(64, 4096)", "--input", "512x64", "--budget", "1GiB", "--json")
    every, loss = (json.loads(run_memfit(*arguments, "--outputs", name).out) for name in ("all", "loss"))
    assert loss["persistent_bytes"] < every["persistent_bytes"]


def test_a_sample_of_a_function(run_memfit):
    arguments = ("plan", "--model", "./net.py:make_model", "--sample", "./net.py:make_batch", "--budget", "1GiB")
    assert json.loads(run_memfit(*arguments, "--json").out)["sample"] == "x: float32[4, 8], scale: float32[8]"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "there is no budget"),
        (("--budget", "-1"), "-1"),
        (("--budget", "0"), "0"),
        (("--budget", "nan"), "nan"),
        (("--budget", "inf"), "inf"),
        (("--budget", "6GoB"), "unknown unit 'GoB'"),
        (("--budget", "much"), "'much'"),
        (("--budget", ""), "''"),
        (("--budget", "0.8", "--allow", "magic"), "unknown technique 'magic'"),
        (("--budget", "0.8", "--allow", ""), "unknown technique ''"),
        (("--budget", "0.8", "--optimizer", "no_such"), "unknown optimizer 'no_such'"),
        (("--budget", "0.8", "--device", "C64"), "device 'C64' is not known"),
        (("--device", "24GiB"), "give bytes as --budget"),
        (("--budget", "0.8", "--outputs", "logits"), "--outputs is all or loss"),
        (("--budget", "0.8", "--recompute", "no_such.*"), "matches no value"),
        (("--budget", "0.8", "--recompute", "nn.Linaer"), "did you mean Linear"),
        (("--budget", "0.8", "--keep", ""), "is empty"),
        (("--budget", "0.8", "--time-limit", "-1"), "--time-limit"),
        (("--budget", "0.8", "--seed", "-1"), "--seed"),
        (("--budget", "0.8", "--output", "."), "--output"),
        (("--budget", "0.8", "--output", "net.py/plan.json"), "could not be written"),
        (("--budget", "0.8", "--top", "0"), "--top"),
    ],
)
def test_bad_input_is_one_paragraph_and_code_2(run_memfit, arguments, complaint):
    outcome = run_memfit(*NET, "--input", "512x64", *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert complaint in outcome.err
    assert "Traceback" not in outcome.err


def test_an_unknown_technique_is_answered_with_what_the_known_ones_mean(run_memfit):
    outcome = run_memfit(*WITH_INPUT, "--budget", "0.8", "--allow", "recompute,magic")
    for name, meaning in memfit.TECHNIQUES.items():
        assert f"{name!r} ({meaning})" in outcome.err


def test_an_interrupt_before_there_is_a_plan_is_code_130(run_memfit, monkeypatch):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "plan", interrupted)
    assert run_memfit(*WITH_INPUT, "--budget", "0.8").code == 130


def test_an_interrupt_while_solving_leaves_the_best_plan_so_far(run_memfit, monkeypatch):
    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(solve._Search, "_round", interrupted)
    outcome = run_memfit(*WITH_INPUT, "--budget", "0.8")
    assert outcome.code == 0
    assert "the search was interrupted" in outcome.out


def test_an_infeasible_budget_of_the_library_is_code_3(run_memfit, monkeypatch):
    def refuses(*_args, **_options):
        raise InfeasibleBudget("first line\nsecond line", smallest_bytes=1)

    monkeypatch.setattr(api, "plan", refuses)
    outcome = run_memfit(*WITH_INPUT, "--budget", "0.8")
    assert outcome.code == 3
    assert outcome.err.splitlines()[-1] == "error: first line second line"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan", ("Exit codes", "  3  no plan fits", "--budget", "--recompute", "--allow", "Examples", "Ctrl-C")),
        ("check", ("Exit codes", "  3  no plan fits", "  4  it computes something else", "--plan", "--tolerance")),
        ("profile", ("Exit codes", "  4  the measured peak is over", "--pairs", "--no-eager")),
        ("frontier", ("Exit codes", "--fractions", "Examples")),
    ],
)
def test_help_shows_the_codes_and_examples(run_memfit, command, words):
    outcome = run_memfit(command, "--help")
    assert outcome.code == 0
    for each in words:
        assert each in outcome.out, each
