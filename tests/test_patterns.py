"""Every usage pattern trains as the plain loop does, bit for bit, or is refused in a sentence."""

from pathlib import Path

import pytest
from patterns import PATTERNS
from patterns.pattern import EQUAL, LEFT, REFUSED, Pattern, is_sound, outcome_of
from patterns.table import page

PAGE = Path(__file__).parents[1] / "docs" / "drop-in.md"


_FAST = 4  # one of so many is in the fast tier


def marked(number: int, pattern: Pattern) -> object:
    marks = [pytest.mark.slow] if pattern.slow or number % _FAST else []
    if pattern.fails:
        marks.append(pytest.mark.xfail(strict=True, reason=pattern.fails))
    return pytest.param(pattern, id=pattern.name, marks=marks)


@pytest.mark.filterwarnings("default")  # what the tools of others warn about is not the matter here
@pytest.mark.parametrize("pattern", [marked(number, pattern) for number, pattern in enumerate(PATTERNS)])
def test_a_pattern_is_equal_or_refused_in_a_sentence(pattern: Pattern, one_thread: None) -> None:
    outcome = outcome_of(pattern)
    assert is_sound(outcome), outcome
    if pattern.fails:
        return  # no longer: say so in the pattern
    if pattern.outcome == EQUAL:
        assert outcome == EQUAL
    else:
        kind = LEFT if pattern.outcome.startswith(LEFT) else REFUSED
        assert outcome.startswith(kind), outcome
        assert pattern.outcome.removeprefix(LEFT) in outcome


def test_names_are_different() -> None:
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)


def test_the_page_has_the_names_and_outcomes_of_the_patterns() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make drop-in`"
