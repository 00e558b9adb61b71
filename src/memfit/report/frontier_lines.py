"""The curve of memory against time, line by line while its points are found."""

from rich.console import Console
from rich.text import Text

from memfit.plan.frontier import activation_fraction
from memfit.plan.plan import Plan
from memfit.report.plan_summary import step_words
from memfit.units import format_bytes

_TITLES = ("peak", "activations", "time", "bound", "planned in")
_WIDTHS = (12, 11, 9, 9, 10)


class FrontierLines:
    """A table that grows. Columns are as wide as they are: what comes later is not known yet."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._has_begun = False
        self._are_estimated = False

    def add(self, plan: Plan) -> None:
        """Print one more point; the first brings the head with it."""
        if not self._has_begun:
            self._begin(plan)
        cells = (
            format_bytes(plan.peak_bytes),
            f"{activation_fraction(plan):.0%}",
            f"{plan.slowdown:+.1%}",
            f"{plan.lower_bound:+.1%}",
            f"{plan.plan_seconds:.1f} s",
        )
        self._print(cells)

    def end(self) -> None:
        """Say what is to be known about the figures."""
        if self._are_estimated:
            self._console.print(Text("note: times are estimated, not measured"))

    def _begin(self, plan: Plan) -> None:
        self._has_begun = True
        self._are_estimated = not plan.times_measured
        self._console.print(Text(step_words(plan)))
        self._console.print(Text(f"unplanned peak {format_bytes(plan.unplanned_peak_bytes)}"))
        self._console.print()
        self._print(_TITLES, style="bold")

    def _print(self, cells: tuple[str, ...], style: str = "") -> None:
        line = " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
        self._console.print(Text(line, style=style), soft_wrap=True)
