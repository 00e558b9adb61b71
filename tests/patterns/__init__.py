"""Usage patterns by theme. `python -m patterns` writes docs/drop-in.md from what comes of them."""

from patterns import changed, forwards, hooks, loops
from patterns.pattern import Pattern

THEMES: dict[str, list[Pattern]] = {
    "Changed between two steps": changed.PATTERNS,
    "In the forward": forwards.PATTERNS,
    "Hooks": hooks.PATTERNS,
    "The loop": loops.PATTERNS,
}
PATTERNS = [pattern for each in THEMES.values() for pattern in each]
