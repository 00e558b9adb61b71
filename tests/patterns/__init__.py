"""Usage patterns by theme. `python -m patterns` writes docs/drop-in.md from them."""

from patterns import around, changed, corners, data, draws, forwards, gradients, hooks, loops
from patterns.pattern import Pattern

THEMES: dict[str, list[Pattern]] = {
    "The loop": loops.PATTERNS,
    "Batches and arguments": data.PATTERNS,
    "Gradients": gradients.PATTERNS,
    "Changed between two steps": changed.PATTERNS,
    "Drawn in the forward": draws.PATTERNS,
    "Written, kept and looked at in the forward": forwards.PATTERNS,
    "Hooks": hooks.PATTERNS,
    "Around models and in them": around.PATTERNS,
    "Corners": corners.PATTERNS,
}
PATTERNS = [pattern for each in THEMES.values() for pattern in each]
