"""The patterns as the page docs/drop-in.md."""

from patterns import PATTERNS, THEMES
from patterns.pattern import EQUAL, LEFT, Pattern

_INTRO = """# What may be around a fitted model

Written by `make drop-in` (`tests/patterns`): {count} ways in which people train, each with a tiny model on a CPU. Each
loop runs for 20 steps plainly, and for 20 steps with the model fitted, from the same seeds. The budget is the smallest
there is, or one with room where steps come to need more than that of the sample. Then all bits are compared: losses,
parameters, gradients (also which have none), buffers, the state of the optimizer, the generators of torch, Python and
NumPy, and what the pattern itself keeps (averages, recorded values, what was appended or printed).

- **equal**: all of that is the same, bit for bit.
- **left as it is**: all of that is the same, too, for nothing of this tiny model is planned: `fit` leaves it, with this
  warning. Of a larger model the parts that do not do this are planned.
- **refused**: `fit`, or the first call that is concerned, raises a `MemfitError` that says this.
- **wrong as yet**: neither. The run differs without a word, or ends with an error that is not memfit's or speaks of
  torch's insides; the table says how.

{equal} equal, {left} left as they are, {refused} refused, {wrong} wrong as yet. `tests/test_patterns.py` runs them all
and compares this page.
"""


def outcome_in_words(pattern: Pattern) -> str:
    if pattern.fails:
        return f"**wrong as yet**: {pattern.fails}"
    if pattern.outcome.startswith(LEFT):
        return f'{LEFT}"{pattern.outcome.removeprefix(LEFT)}"'
    return EQUAL if pattern.outcome == EQUAL else f'refused: "{pattern.outcome}"'


def page() -> str:
    """The whole page."""
    wrong = sum(bool(each.fails) for each in PATTERNS)
    equal = sum(each.outcome == EQUAL and not each.fails for each in PATTERNS)
    left = sum(each.outcome.startswith(LEFT) and not each.fails for each in PATTERNS)
    refused = len(PATTERNS) - wrong - equal - left
    lines = [_INTRO.format(count=len(PATTERNS), equal=equal, left=left, refused=refused, wrong=wrong)]
    for theme, patterns in THEMES.items():
        lines += [f"## {theme}", "", "| pattern | outcome |", "|---|---|"]
        lines += [f"| {each.name} | {outcome_in_words(each)} |" for each in patterns]
        lines.append("")
    return "\n".join(lines)
