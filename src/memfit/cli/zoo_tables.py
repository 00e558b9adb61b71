"""The zoo for the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from memfit.report.tables import plain_table
from memfit.units import format_bytes
from memfit.zoo import Entry, Verdict

_WIDTH_FOR_ALL = 104  # columns


def print_entries(console: Console, found: Sequence[Entry]) -> None:
    """Print a line for each plan."""
    titles = ("plan", "peak", "saved", "time", "optimizer", "unplanned", "at best")
    shown = titles if console.width >= _WIDTH_FOR_ALL else titles[:4]
    table = plain_table(f"{len(found)} plans")
    for title in shown:
        table.add_column(title, justify="left" if title == "plan" else "right", no_wrap=True)
    for each in found:
        mark = "" if each.times_measured else "*"
        cells = (
            each.name,
            format_bytes(each.peak_bytes),
            f"{each.saved:.0%}",
            f"{each.slowdown:+.1%}{mark}",
            each.optimizer,
            format_bytes(each.unplanned_peak_bytes),
            f"{each.lower_bound:+.1%}{mark}",
        )
        table.add_row(*cells[: len(shown)])
    console.print(table)
    if not all(each.times_measured for each in found):
        console.print(Text("* times are estimated: the device was not there when the plan was made"))


def print_verdicts(console: Console, found: Sequence[Verdict], *, of: int) -> None:
    """Print what does not hold, and how many do."""
    for each in found:
        if not each.holds:
            console.print(Text(f"{each.name}: {each.reason}", style="red"), soft_wrap=True)
    style = "bold green" if len(found) == of and all(each.holds for each in found) else "bold red"
    console.print(Text(verdict_words(found, of=of), style=style))


def verdict_words(found: Sequence[Verdict], *, of: int) -> str:
    """How many plans are what they say.

    >>> verdict_words([Verdict(name="a", reason="", peak_bytes=1, seconds=0.5)], of=2)
    '1 of 2 plans checked in 0.5 s: 1 hold, 0 do not'
    """
    holding = sum(each.holds for each in found)
    seconds = sum(each.seconds for each in found)
    return f"{len(found)} of {of} plans checked in {seconds:.1f} s: {holding} hold, {len(found) - holding} do not"
