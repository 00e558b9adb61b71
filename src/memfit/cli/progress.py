"""What is going on, shown on the terminal while it takes time and gone afterwards."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Display:
    """One line: what is being done, how much of it, for how long."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, count="")

    def doing(self, description: str) -> None:
        """Begin something of unknown length."""
        self._progress.reset(self._task, total=None, description=description, count="")

    def measured(self, done: int, total: int) -> None:
        """Tell how many operators have been measured."""
        self._progress.update(
            self._task, description="measuring operators", completed=done, total=total, count=f"{done}/{total}"
        )


@contextlib.contextmanager
def display() -> Iterator[Display]:
    """A display on stderr; nothing is shown where that is not a terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Display(progress)
