"""`memfit doctor`: snapshots and messages in, explanations out, nothing of either run."""

import dataclasses
import gzip
import io
import json
import os
import pickle
import sys

import pytest
from command_line import Program
from recorded import as_snapshot
from recorded_training import training

MESSAGE = (
    "CUDA out of memory. Tried to allocate 3.00 GiB (GPU 1; 16.00 GiB total capacity; 12.00 GiB already allocated; "
    "1.50 GiB free; 13.00 GiB reserved in total by PyTorch)"
)


@pytest.fixture
def run_memfit(monkeypatch, capsys):
    return Program(monkeypatch, capsys)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(as_snapshot(training())))
    (tmp_path / "error.txt").write_text(f"step 7\n{MESSAGE}\n")
    return tmp_path


def give(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_snapshot_is_explained_and_a_page_is_written(run_memfit, folder):
    outcome = run_memfit("doctor", "snapshot.pickle", "--html", "page.html")
    assert (outcome.code, outcome.err) == (0, "")
    for words in ("Peak", "make_model", "expandable_segments:True", "Never freed"):
        assert words in outcome.out
    assert "snapshot.pickle" in (folder / "page.html").read_text()


def test_json_is_all_there_is_on_stdout(run_memfit):
    answer = json.loads(run_memfit("doctor", "snapshot.pickle", "--json", "--top", "1").out)
    assert answer["replayed_exactly"]
    assert len(answer["by_line"]) == 1


def test_a_setting_of_ones_own_is_simulated(run_memfit):
    answer = json.loads(run_memfit("doctor", "snapshot.pickle", "--json", "--setting", "max_split_size_mb:33").out)
    assert "max_split_size_mb:33" in [row["label"] for row in answer["by_setting"]]
    outcome = run_memfit("doctor", "snapshot.pickle", "--setting", "max_split:33")
    assert outcome.code == 2
    assert "not known" in outcome.err


def test_a_page_that_exists_is_left_alone(run_memfit, folder):
    (folder / "page.html").write_text("mine")
    outcome = run_memfit("doctor", "snapshot.pickle", "--html", "page.html")
    assert (outcome.code, (folder / "page.html").read_text()) == (2, "mine")
    assert run_memfit("doctor", "snapshot.pickle", "--html", "page.html", "--force").code == 0


def test_of_several_gpus_the_fullest_is_shown_and_the_others_are_named(run_memfit, folder):
    other = dataclasses.replace(training(), device=2)
    (folder / "two.json.gz").write_bytes(gzip.compress(json.dumps(as_snapshot(training(), other)).encode()))
    outcome = run_memfit("doctor", "two.json.gz")
    assert "showing GPU 0; --gpu shows 2" in outcome.err
    assert "GPU 2" in run_memfit("doctor", "two.json.gz", "--gpu", "2").out
    outcome = run_memfit("doctor", "two.json.gz", "--gpu", "1")
    assert outcome.code == 2
    assert "nothing of GPU 1; it has 0, 2" in outcome.err


def test_a_message_is_explained_from_a_file_and_from_stdin(run_memfit, monkeypatch):
    from_file = run_memfit("doctor", "error.txt")
    assert from_file.code == 0
    assert "Not fragmentation" in from_file.out
    give(monkeypatch, MESSAGE.encode())
    assert run_memfit("doctor", "-").out == from_file.out
    assert json.loads(run_memfit("doctor", "error.txt", "--json").out)["tried_bytes"] == 3 * 2**30


def test_a_snapshot_comes_from_stdin_too(run_memfit, monkeypatch):
    give(monkeypatch, gzip.compress(pickle.dumps(as_snapshot(training()))))
    assert "stdin: GPU 0" in run_memfit("doctor", "-").out


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps({"segments": Evil()}), "mkdir"),
        (pickle.dumps(as_snapshot(training()))[:-100], "damaged or cut off"),
        (b"all is well", "no out-of-memory message"),
        (b"", "no out-of-memory message"),
        (b"\x80\x04}.", "no list of segments"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_paragraph(run_memfit, folder, content, words):
    (folder / "bad").write_bytes(content)
    outcome = run_memfit("doctor", "bad")
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
    assert not (folder / "made").exists()


def test_options_of_snapshots_are_not_for_messages(run_memfit):
    outcome = run_memfit("doctor", "error.txt", "--html", "page.html")
    assert outcome.code == 2
    assert "for snapshots" in outcome.err


NET = """
from torch import nn


def make():
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)])
"""
ABOUT = ("--model", "./net.py:make", "--input", "4096x256", "--device", "RTX 3060")


def out_of(free_mib, reserved_mib):
    return MESSAGE.replace("1.50 GiB free; 13.00 GiB reserved", f"{free_mib} MiB free; {reserved_mib} MiB reserved")


@pytest.mark.parametrize(
    ("free_mib", "reserved_mib", "words"),
    [
        ("60.00", "100.00", "A plan fits: the step reserves"),
        ("100.00", "900.00", "fits without a plan"),
        ("1.00", "30.00", "No plan of this model and sample fits the 31.00 MiB"),
    ],
)
def test_the_plan_that_would_have_fitted_is_told(run_memfit, folder, free_mib, reserved_mib, words):
    (folder / "net.py").write_text(NET)
    (folder / "error.txt").write_text(out_of(free_mib, reserved_mib))
    outcome = run_memfit("doctor", "error.txt", *ABOUT)
    assert outcome.code == 0
    assert words in " ".join(outcome.out.split())


def test_the_plan_is_part_of_what_a_snapshot_says(run_memfit, folder):
    (folder / "net.py").write_text(NET)
    outcome = run_memfit("doctor", "snapshot.pickle", "--json", "--html", "page.html", *ABOUT)
    (words,) = [each for each in json.loads(outcome.out)["findings"] if "without a plan" in each]
    assert words in (folder / "page.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "RTX 3060"), "give --model too"),
        (("--model", "torch.nn.Linear(2,2)", "--input", "2x2"), "--model needs the GPU"),
        (("--model", "torch.nn.Linear(2,2)", "--input", "2x2", "--device", "RTX 3061"), "did you mean"),
    ],
)
def test_half_of_what_was_trained_is_refused(run_memfit, options, words):
    outcome = run_memfit("doctor", "error.txt", *options)
    assert outcome.code == 2
    assert words in outcome.err
