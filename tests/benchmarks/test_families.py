import dataclasses

import pytest

from benchmarks.families import _row, is_sound
from benchmarks.family_case import CRASHED, REFUSED, WHOLE, FamilyResult

MIB = 2**20
EXACT = FamilyResult(
    name="GPT-2",
    library="transformers",
    captured=WHOLE,
    exact=True,
    half_bytes=60 * MIB,
    budget_bytes=60 * MIB,
    peak_bytes=59 * MIB,
    eager_peak_bytes=100 * MIB,
    slowdown=0.1,
)


def other(difference: float | None, beyond: float | None) -> FamilyResult:
    return dataclasses.replace(EXACT, exact=False, difference=difference, beyond_rounding=beyond)


@pytest.mark.parametrize(
    ("result", "sound", "said"),
    [
        (EXACT, True, "bit for bit"),
        (other(0.9, 0.0), True, "rounding"),
        (other(0.9, 1e-6), True, "up to 1.0e-06"),
        (other(0.9, 0.9), False, "up to 9.0e-01"),
        (other(0.9, None), False, "up to 9.0e-01"),
    ],
)
def test_what_differs_is_told_from_what_is_rounded(result: FamilyResult, sound: bool, said: str) -> None:
    assert is_sound(result) is sound
    assert f"| {said} |" in _row(result)


@pytest.mark.parametrize("captured", [REFUSED, CRASHED])
def test_what_was_not_captured_is_not_sound(captured: str) -> None:
    assert not is_sound(dataclasses.replace(EXACT, captured=captured))
