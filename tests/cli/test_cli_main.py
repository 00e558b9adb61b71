import json
import subprocess
import sys

import pytest
import torch
from command_line import Program, folder_with_net

import memfit
from memfit import api


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return folder_with_net(tmp_path, monkeypatch)


@pytest.fixture
def run_memfit(monkeypatch, capsys):
    return Program(monkeypatch, capsys)


NET = ("estimate", "--model", "./net.py:make_model", "--no-measure")
WITH_INPUT = (*NET, "--input", "4x8")


def test_without_a_device_the_answer_is_printed_and_the_code_is_0(run_memfit):
    outcome = run_memfit(*WITH_INPUT)
    assert outcome.code == 0
    assert "Net, forward and backward" in outcome.out
    assert "no optimizer is counted: adamw would keep" in outcome.out
    assert "Net, training step with adamw" in run_memfit(*WITH_INPUT, "--optimizer", "adamw").out
    assert "FIT" not in outcome.out


@pytest.mark.parametrize(
    ("device", "code", "words"),
    [
        ("1GiB", 0, "FITS 1.00 GiB"),
        ("100B", 1, "DOES NOT FIT 100 B"),
        ("A100-40GB", 0, "FITS A100-40GB (39.15 GiB usable)"),
    ],
)
def test_the_code_says_whether_it_fits(run_memfit, device, code, words):
    outcome = run_memfit(*WITH_INPUT, "--device", device)
    assert (outcome.code, outcome.err.count("Traceback")) == (code, 0)
    assert words in outcome.out


def test_a_model_bigger_than_any_device_does_not_fit_it(run_memfit):
    huge = ("estimate", "--model", "torch.nn.Linear(200_000, 200_000)", "--input", "1x200_000".replace("_", ""))
    assert run_memfit(*huge, "--device", "H200").code == 1


def test_json_is_all_there_is_on_stdout_though_modules_print(run_memfit):
    outcome = run_memfit(*WITH_INPUT, "--json", "--device", "100B")
    answer = json.loads(outcome.out)
    assert outcome.code == 1
    assert answer["fits"] is False
    assert answer["device_usable_bytes"] == 100
    assert answer["peak_bytes"] == sum(answer["by_kind"].values())
    assert "printed while importing" in outcome.err


def test_json_without_a_device_says_that_nobody_asked(run_memfit):
    answer = json.loads(run_memfit(*WITH_INPUT, "--json").out)
    assert answer["fits"] is None
    assert answer["device_usable_bytes"] is None


def test_the_figures_are_those_of_the_library(run_memfit):
    answer = json.loads(run_memfit(*WITH_INPUT, "--json", "--optimizer", "sgd").out)
    linear = torch.nn.Sequential(torch.nn.Linear(8, 8))
    expected = memfit.estimate(linear, torch.zeros(4, 8), optimizer="sgd", measure=False)
    assert answer["peak_bytes"] == expected.peak_bytes


def test_optimizers_are_chosen_by_name(run_memfit):
    def state(name):
        answer = json.loads(run_memfit(*WITH_INPUT, "--json", "--optimizer", name).out)
        return answer["by_kind"].get("optimizer state", 0), answer["optimizer"]

    parameter_bytes = 4 * (8 * 8 + 8)
    assert state("none") == (0, None)
    assert state("sgd") == (parameter_bytes, "sgd")


@pytest.mark.parametrize("shard", ["ddp", "zero1", "fsdp"])
def test_one_of_several_ranks_is_estimated(run_memfit, shard):
    def peak_bytes(*options):
        return json.loads(run_memfit(*WITH_INPUT, "--optimizer", "adamw", "--json", *options).out)["peak_bytes"]

    alone, one = peak_bytes(), peak_bytes("--world-size", "1", "--shard", shard)
    assert one == alone
    assert peak_bytes("--world-size", "8", "--shard", shard) != alone
    assert peak_bytes("--world-size", "8", "--bucket-views") < peak_bytes("--world-size", "8")


def test_a_dtype_is_for_parameters_and_inputs(run_memfit):
    answer = json.loads(run_memfit(*WITH_INPUT, "--json", "--dtype", "bfloat16").out)
    assert [each["dtype"] for each in answer["parameters"]] == ["bfloat16"]
    assert answer["by_kind"]["batch"] == 4 * 8 * 2


def test_a_sample_of_a_function(run_memfit):
    answer = json.loads(run_memfit(*NET, "--sample", "./net.py:make_batch", "--json").out)
    assert answer["by_kind"]["batch"] == 4 * (4 * 8 + 8)


def test_operators_are_measured_when_asked_for(run_memfit):
    arguments = ("estimate", "--model", "./net.py:make_model", "--input", "4x8", "--json")
    assert json.loads(run_memfit(*arguments, "--measure").out)["workspaces_measured"] is True
    assert json.loads(run_memfit(*arguments, "--no-measure").out)["workspaces_measured"] is False


def test_the_page_is_written(run_memfit, folder):
    outcome = run_memfit(*WITH_INPUT, "--html", "new/report.html")
    assert outcome.code == 0
    assert "<!DOCTYPE html>" in (folder / "new" / "report.html").read_text()


def test_depth_can_be_chosen(run_memfit):
    deep = ("estimate", "--model", "./net.py:make_model(8, 12)", "--no-measure", "--input", "4x8")

    def modules(depth):
        out = run_memfit(*deep, "--depth", depth).out
        return out[out.index("by module") : out.index("Biggest values")]

    assert "layers.0" not in modules("1")
    assert "layers.0" in modules("2")


def test_the_number_of_rows_can_be_chosen(run_memfit):
    deep = ("estimate", "--model", "./net.py:make_model(8, 12)", "--no-measure", "--input", "4x8")
    few, many = (run_memfit(*deep, "--top", top).out for top in ("3", "30"))
    assert few.count("parameter 8x8 float32") == 3
    assert many.count("parameter 8x8 float32") == 12


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("estimate", "--input", "4x8"), "--model"),
        (NET, "there is no sample"),
        ((*WITH_INPUT, "--sample", "./net.py:make_batch"), "both --input and --sample"),
        ((*NET, "--input", "4x"), "a size is missing"),
        ((*NET, "--input", "0x8"), "'0' is not a size"),
        ((*NET, "--input", "-1x8"), "'-1' is not a size"),
        ((*NET, "--input", "axb"), "'a' is not a size"),
        ((*NET, "--input", "4x8:float99"), "'float99' is not a dtype"),
        ((*NET, "--input", "4x9"), "could not be captured"),
        (("estimate", "--model", "torch.nn.Embedding(9, 4)", "--input", "2x3"), "could not be captured"),
        ((*NET, "--input", "no_such_argument=4x8"), "does not fit Net.forward"),
        ((*NET, "--sample", "./net.py:fails"), "ValueError: a reason in two lines"),
        ((*NET, "--sample", "./nothing.py:f"), "there is no file"),
        ((*WITH_INPUT, "--device", "C64"), "device 'C64' is not known"),
        ((*WITH_INPUT, "--device", "24GoB"), "unknown unit 'GoB'"),
        ((*WITH_INPUT, "--device", ""), "device ''"),
        ((*WITH_INPUT, "--optimizer", "no_such"), "unknown optimizer 'no_such'"),
        ((*WITH_INPUT, "--dtype", "int8"), "int8"),
        ((*WITH_INPUT, "--top", "0"), "--top"),
        ((*WITH_INPUT, "--depth", "0"), "--depth"),
        ((*WITH_INPUT, "--html", "."), "--html"),
        ((*WITH_INPUT, "--html", "net.py/report.html"), "could not be written"),
        ((*WITH_INPUT, "--no-such-option"), "--no-such-option"),
        (("no-such-verb",), "no-such-verb"),
        (("estimate", "--model", "no_such_package:f", "--input", "1"), "there is no module"),
        (("estimate", "--model", "torch.nn.Linaer()", "--input", "1"), "did you mean Linear"),
        (("estimate", "--model", "torch.nn.Linear()", "--input", "1"), "missing 2 required"),
        (("estimate", "--model", "torch.nn.Linear(", "--input", "1"), "cannot be read"),
        (("estimate", "--model", "torch.nn.Linear(n, n)", "--input", "1"), "'n' is not a literal"),
        (("estimate", "--model", "torch.nn.ReLU()", "--input", "1"), "no parameter"),
        (("estimate", "--model", "torch.ones(2)", "--input", "1"), "a torch.nn.Module was expected"),
    ],
)
def test_bad_input_is_one_paragraph_and_code_2(run_memfit, arguments, complaint):
    outcome = run_memfit(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert complaint in outcome.err
    assert "Traceback" not in outcome.err


def test_an_error_is_one_line_whatever_the_reason_looks_like(run_memfit):
    outcome = run_memfit("estimate", "--model", "./net.py:fails", "--input", "1")
    paragraphs = [line for line in outcome.err.splitlines() if line != "printed while importing"]
    assert len(paragraphs) == 1
    assert paragraphs[0].startswith("error: './net.py:fails': building the model failed")


@pytest.mark.parametrize(
    "model",
    [
        "__import__('os').system('touch TRACE')",
        "open('TRACE', 'w')",
        "(lambda: open('TRACE', 'w'))()",
        "[open('TRACE', 'w')][0]",
        "torch.nn.Linear(4, open('TRACE', 'w'))",
        "torch.nn.Linear(4, 4, bias=open('TRACE', 'w'))",
        "torch.nn.Linear(*[open('TRACE', 'w')])",
        "torch.nn.Linear(**{'a': open('TRACE', 'w')})",
        "torch.nn.Linear(f\"{open('TRACE', 'w')}\")",
        "torch.nn.Linear([x for x in open('TRACE', 'w')])",
        "os:system('touch TRACE')",
        "os.system('touch TRACE')",
        "torch:os.system('touch TRACE')",
        "subprocess:run(['touch', 'TRACE'])",
        "pathlib:Path.touch('TRACE')",
        "builtins:open('TRACE', 'w')",
        'builtins:exec(\'open("TRACE", "w")\')',
        "./net.py:make_model.__globals__",
    ],
)
def test_nothing_is_evaluated(run_memfit, folder, model):
    outcome = run_memfit("estimate", "--model", model, "--input", "1x4")
    sample = run_memfit("estimate", "--model", "./net.py:make_model", "--sample", model)
    assert (outcome.code, sample.code) == (2, 2)
    assert "Traceback" not in outcome.err + sample.err
    assert not (folder / "TRACE").exists()


def test_an_error_of_the_library_is_one_line_too(run_memfit, monkeypatch):
    def refuses(*_args, **_options):
        raise memfit.InvalidInput("first line\nsecond line \x1b[31m")

    monkeypatch.setattr(api, "estimate", refuses)
    outcome = run_memfit(*WITH_INPUT)
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1] == "error: first line second line ?[31m"


def test_letters_that_steer_a_terminal_are_not_printed(run_memfit):
    outcome = run_memfit("estimate", "--model", "torch.nn.Linear(\x1b[31m)", "--input", "1")
    assert "\x1b" not in outcome.err


def test_an_interrupt_is_one_line_and_code_130(run_memfit, monkeypatch):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "estimate", interrupted)
    outcome = run_memfit(*WITH_INPUT)
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in outcome.err


def test_a_bug_is_not_mistaken_for_a_step_that_does_not_fit(run_memfit, monkeypatch):
    def broken(*_args, **_options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(api, "estimate", broken)
    outcome = run_memfit(*WITH_INPUT)
    assert outcome.code == 70
    assert "RuntimeError: a bug" in outcome.err


def test_help_shows_the_codes_and_examples(run_memfit):
    outcome = run_memfit("estimate", "--help")
    assert outcome.code == 0
    for words in ("Exit codes", "does not fit", "Examples", "torchvision.models.resnet50", "--device"):
        assert words in outcome.out


def test_the_version(run_memfit):
    assert run_memfit("--version").out.strip() == f"memfit {memfit.__version__}"


def test_the_installed_program_ends_with_the_code(folder):
    program = "from memfit.cli.main import run; run()"
    arguments = ["estimate", "--model", "__import__('os').system('touch TRACE')", "--input", "1"]
    ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert not (folder / "TRACE").exists()
