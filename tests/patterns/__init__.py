"""Usage patterns by theme. `python -m patterns` writes docs/drop-in.md from them."""

from patterns import (
    around,
    asked,
    borders,
    changed,
    corners,
    data,
    deep,
    draws,
    forwards,
    gradients,
    hooks,
    late,
    loops,
    moved,
    own,
    programs,
    seen,
    weights,
)
from patterns.pattern import Pattern

THEMES: dict[str, list[Pattern]] = {
    "The loop": loops.PATTERNS,
    "Batches and arguments": data.PATTERNS,
    "Gradients": gradients.PATTERNS,
    "Weights": weights.PATTERNS,
    "Changed between two steps": changed.PATTERNS,
    "Changed deep inside": deep.PATTERNS,
    "Drawn in the forward": draws.PATTERNS,
    "Written, kept and looked at in the forward": forwards.PATTERNS,
    "Seen and told by the forward": seen.PATTERNS,
    "Read in the backward pass": late.PATTERNS,
    "Hooks": hooks.PATTERNS,
    "Programs of several fields": programs.PATTERNS,
    "Around models and in them": around.PATTERNS,
    "Borders of parts and calls": borders.PATTERNS,
    "Given and asked": asked.PATTERNS,
    "Asked of own tensors": own.PATTERNS,
    "Run to be planned": moved.PATTERNS,
    "Corners": corners.PATTERNS,
}
PATTERNS = [pattern for each in THEMES.values() for pattern in each]
