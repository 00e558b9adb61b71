import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.errors import InvalidBudget, InvalidInput
from memfit.recipe import check_budget
from memfit.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        (1, 1),
        (4096.0, 4096),
        ("812", 812),
        ("812B", 812),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("2MB", 2_000_000),
        ("2MiB", 2 * 2**20),
        ("6GiB", 6 * 2**30),
        ("1.5 GB", 1_500_000_000),
        (".5GiB", 2**29),
        ("1e3MB", 10**9),
        ("3TB", 3 * 10**12),
        ("3TiB", 3 * 2**40),
        ("  6gib ", 6 * 2**30),
    ],
)
def test_quantities_are_read(written: int | float | str, size_bytes: int) -> None:
    assert parse_bytes(written) == size_bytes


@pytest.mark.parametrize(
    "nonsense",
    [
        0,
        -1,
        -0.5,
        float("nan"),
        float("inf"),
        True,
        False,
        "",
        " ",
        "0",
        "-6GiB",
        "GiB",
        "6GiBs",
        "1 2",
        "nan",
        b"7MiB",
        [5],
        {},
    ],
)
def test_nonsense_is_refused(nonsense: object) -> None:
    with pytest.raises(InvalidBudget) as caught:
        parse_bytes(nonsense)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_an_unknown_unit_is_named_beside_the_known_ones() -> None:
    with pytest.raises(InvalidBudget, match=r"unknown unit 'apples' .* known are B, kB, .*GiB, TiB"):
        parse_bytes("6 apples")


@pytest.mark.parametrize(
    ("size_bytes", "written"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (6 * 2**30, "6.00 GiB"),
        (2**40, "1.00 TiB"),
        (5000 * 2**40, "5000.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes_are_written_for_people(size_bytes: int, written: str) -> None:
    assert format_bytes(size_bytes) == written


@given(st.integers(min_value=1, max_value=2**53))
def test_a_number_of_bytes_is_read_as_it_is(size_bytes: int) -> None:
    assert parse_bytes(size_bytes) == parse_bytes(str(size_bytes)) == size_bytes


@given(st.integers(min_value=1, max_value=2**53))
def test_what_is_written_reads_back_within_its_last_digit(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.005)


@given(st.text() | st.from_regex(r"[0-9.]{0,6} ?[KMGTkmgtiIbB]{0,3}", fullmatch=True))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidBudget):
        assert parse_bytes(text) >= 0


@pytest.mark.parametrize("fraction", [0.25, "0.25B"])
def test_less_than_a_byte_is_refused(fraction: float | str) -> None:
    with pytest.raises(InvalidBudget):
        parse_bytes(fraction)


def test_more_than_a_float_can_hold_is_refused() -> None:
    with pytest.raises(InvalidBudget):
        parse_bytes("1e308TB")


@pytest.mark.parametrize("exact", [2**53 + 1, 10**400], ids=["odd", "huge"])
def test_an_integer_is_taken_exactly(exact: int) -> None:
    assert parse_bytes(exact) == exact


@pytest.mark.parametrize("budget", [1.5, 1000.0, "50%", " 7 % ", b"7MiB", [5], {}])
def test_what_is_no_budget_is_refused_in_a_sentence(budget: object) -> None:
    with pytest.raises(InvalidBudget):
        check_budget(budget)  # type: ignore[arg-type]


def test_named_budgets_are_read_as_people_write_them() -> None:
    assert memfit.plan(nn.Linear(4, 4), torch.ones(2, 4), budget=" Smallest ").peak_bytes > 0


@pytest.mark.parametrize("wrong", [{"time_limit": "5"}, {"time_limit": None}])
def test_what_is_no_time_limit_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        memfit.plan(nn.Linear(4, 4), torch.ones(2, 4), budget=0.5, **wrong)
