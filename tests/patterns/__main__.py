"""Writes docs/drop-in.md from the outcomes that the patterns state; the tests hold them to it.

python -m patterns  # in the folder tests
"""

from pathlib import Path

from patterns.table import page

PAGE = Path(__file__).parents[2] / "docs" / "drop-in.md"

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
