import pytest
from handmade_reports import MIB, make_check, make_profile, printed

from memfit.report.proof_tables import check_verdict, print_check, print_profile, profile_verdict


def test_an_equal_step_is_said_to_be_equal():
    text = printed(print_check, make_check())
    assert "the eager step was run as it is" in text
    assert "Net, planned against eager, seed 7" in text
    assert "3 of 3" in text
    assert "EQUAL bit for bit" in text
    assert "stem.weight" not in text


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (make_check(), "EQUAL bit for bit"),
        (make_check(equal=2, difference=1e-7, tolerance=1e-6), "EQUAL within the tolerance of 1e-06"),
        (
            make_check(equal=2, difference=1e-3, tolerance=1e-6),
            "DIFFERENT: the planned step was to be equal within 1e-06",
        ),
        (make_check(equal=2, difference=1e-3), "DIFFERENT: the planned step was to be equal bit for bit"),
    ],
)
def test_verdicts_on_numbers(check, verdict):
    assert check_verdict(check) == verdict


def test_the_worst_difference_is_shown_with_its_place():
    assert "1.0e-03 in stem.weight" in printed(print_check, make_check(equal=2, difference=1e-3))


def test_a_profile_shows_measured_predicted_and_eager():
    text = printed(print_profile, make_profile())
    for words in ("10.00 MiB", "11.00 MiB (+10.00%)", "20.00 MiB", "+7.1%", "+6.4%", "125.0 ms"):
        assert words in text


def test_a_profile_without_eager_steps_has_no_slowdown():
    text = printed(print_profile, make_profile(eager_peak_bytes=None, slowdown=None))
    assert "time" not in text
    assert "20.00 MiB" not in text


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "WITHIN the budget of 12.00 MiB with 2.00 MiB to spare"),
        ({"peak_bytes": int(12.06 * MIB)}, "WITHIN the budget of 12.00 MiB, up to 0.50%"),
        ({"peak_bytes": 15 * MIB}, "OVER the budget of 12.00 MiB by 3.00 MiB (25.0%)"),
        ({"budget_bytes": None}, "no budget: 10.00 MiB measured"),
    ],
)
def test_verdicts_on_memory(changes, verdict):
    assert profile_verdict(make_profile(**changes)) == verdict


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    for text in (printed(print_check, make_check(equal=2, difference=1e-3), width=width),):
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    text = printed(print_profile, make_profile(), width=width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
