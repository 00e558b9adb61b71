"""What is going on, shown on the terminal while it takes time and gone afterwards."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from memfit.progress import ProgressLine, SearchState, search_words, speaking


class _Remaining(TimeRemainingColumn):
    """How long it still takes at most; nothing where that is not known."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None or task.time_remaining is None else super().render(task) + Text(" left")


class Display(ProgressLine):
    """One line: what is being done, how much of it, for how long, and how long it may still take."""

    def __init__(self, progress: Progress, time_limit_s: float | None = None) -> None:
        self._progress = progress
        self._time_limit_s = time_limit_s  # of a search for plans
        self._task = progress.add_task("", total=None, count="")
        self._is_solving = False

    def doing(self, stage: str) -> None:
        """Begin something of unknown length."""
        self._is_solving = False
        self._progress.reset(self._task, total=None, description=stage, count="")

    def measured(self, done: int, total: int) -> None:
        """Tell how many operators have been measured."""
        self.counted("measuring operators", done, total)

    def planned(self, done: int, total: int) -> None:
        """Tell how many budgets have been planned for."""
        self.counted("planning the next budget", done, total)

    def checked(self, done: int, total: int) -> None:
        """Tell how many stored plans have been looked at."""
        self.counted("checking stored plans", done, total)

    def note(self, text: str) -> None:
        """Say something that stays, beside the line that goes."""
        with self.hidden():
            self._progress.console.print(text, highlight=False, markup=False)

    def ran(self, done: int, total: int) -> None:
        """Tell how many pairs of steps have run."""
        self.counted("running planned and eager steps", done, total)

    def found(self, found: SearchState) -> None:
        """Tell the best plan so far and what no plan can be below."""
        if not self._is_solving:
            self.doing("planning")
            self._is_solving = True
        limit_s = self._time_limit_s
        completed = 0.0 if limit_s is None else min(found.seconds, limit_s)
        self._progress.update(self._task, description=solving_words(found), completed=completed, total=limit_s)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Away for a moment, so that something can be written on the same terminal."""
        if self._progress.disable:
            yield
            return
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()

    def counted(self, stage: str, done: int, total: int) -> None:
        """Tell how much of something is done."""
        self._progress.update(self._task, description=stage, completed=done, total=total, count=f"{done}/{total}")


def solving_words(found: SearchState) -> str:
    """The state of a search in one line.

    >>> from memfit.plan.solve import Found
    >>> solving_words(Found(seconds=1.5, slowdown=0.064, bound=0.031, stages=7))
    'planning: best +6.4%, bound +3.1%, 1.5 s (Ctrl-C takes the best)'
    """
    return f"planning: {search_words(found)}"


@contextlib.contextmanager
def display(time_limit_s: float | None = None) -> Iterator[Display]:
    """A display on stderr; nothing is shown where that is not a terminal. The time limit is that of a search.

    Calls in the body speak through it, so that there is one line and no second.
    """
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        _Remaining(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        shown = Display(progress, time_limit_s)
        with speaking(shown):
            yield shown
