"""Usage patterns by theme. `python -m patterns` writes docs/drop-in.md from what comes of them."""

from patterns import changed, forwards
from patterns.pattern import Pattern

THEMES: dict[str, list[Pattern]] = {
    "Changed between two steps": changed.PATTERNS,
    "In the forward": forwards.PATTERNS,
}
PATTERNS = [pattern for each in THEMES.values() for pattern in each]
