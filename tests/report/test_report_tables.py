import io

import pytest
from handmade_estimate import make_estimate
from rich.console import Console

from memfit.report.limit import Limit
from memfit.report.tables import print_estimate
from memfit.units import format_bytes

STAGES = [f"stage{i}" for i in range(1, 6)]


def printed(estimate, limit=None, *, width=80, encoding="utf-8", **options):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_estimate(Console(file=stream, width=width), estimate, limit, **options)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def test_everything_is_said():
    estimate = make_estimate(STAGES, notes=("a note for readers",))
    text = printed(estimate)
    for words in (
        "Net, training step with sgd, on cpu",
        "Batch 512 float32",
        f"Peak {format_bytes(estimate.peak_bytes)}",
        "in the backward of stage5, operation backward_4",
        "At the peak, by kind",
        "At the peak, by module",
        "Biggest values at the peak",
        "activation 1024 float32",
        "net.py:4",
        "float32, trainable",
        "1,050",
        "a note for readers",
    ):
        assert words in text, words


@pytest.mark.parametrize(("device", "words"), [("1GiB", "FITS 1.00 GiB with"), ("1KiB", "DOES NOT FIT 1.00 KiB: ")])
def test_the_verdict(device, words):
    assert words in printed(make_estimate(STAGES), Limit.of(device))


def test_without_a_limit_there_is_no_verdict():
    assert "FIT" not in printed(make_estimate(STAGES))


@pytest.mark.parametrize("width", [20, 32, 40, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_size_is_lost(width):
    estimate = make_estimate([f"encoder.{stage}.with_a_long_name" for stage in STAGES], notes=("word " * 30,))
    text = printed(estimate, Limit.of("A100-40GB"), width=width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for size_bytes in estimate.by_kind().values():
        assert format_bytes(size_bytes) in text


def test_wide_terminals_get_a_column_for_every_fact():
    header = next(line for line in printed(make_estimate(STAGES), width=140).splitlines() if "made by" in line)
    assert header.split() == ["size", "kind", "shape", "dtype", "made", "by", "source"]


def test_a_terminal_without_blocks_gets_plain_letters():
    assert "####" in printed(make_estimate(STAGES), encoding="ascii")


def test_names_are_text_and_not_markup():
    text = printed(make_estimate(["[bold red]stage", *STAGES]), width=140)
    by_module, values = text[text.index("by module") :].split("Biggest values")
    assert "[bold red]stage" in by_module
    assert "[bold red]stage" in values


def test_the_number_of_rows():
    assert printed(make_estimate(STAGES), top=2).count("activation 1024 float32") == 2
