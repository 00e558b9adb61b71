"""Usage patterns by theme. `python -m patterns` writes docs/drop-in.md from what comes of them."""

from patterns import around, changed, forwards, gradients, hooks, loops
from patterns.pattern import Pattern

THEMES: dict[str, list[Pattern]] = {
    "Changed between two steps": changed.PATTERNS,
    "In the forward": forwards.PATTERNS,
    "Hooks": hooks.PATTERNS,
    "The loop": loops.PATTERNS,
    "Gradients": gradients.PATTERNS,
    "Around models and in them": around.PATTERNS,
}
PATTERNS = [pattern for each in THEMES.values() for pattern in each]
