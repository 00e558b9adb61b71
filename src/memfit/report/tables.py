"""An estimate for the terminal."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.estimate import Estimate
from memfit.report import breakdown
from memfit.report.breakdown import Row, ValueRow
from memfit.report.limit import Limit
from memfit.units import format_bytes

_BAR_WIDTH = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_WIDTH_FOR_BARS = 72  # columns; below, bars would squeeze the names
_WIDTH_FOR_COLUMNS = 116  # below, a value takes two lines instead of six columns
_COLOURS = {
    "parameter": "blue",
    "buffer": "bright_blue",
    "batch": "bright_black",
    "optimizer state": "magenta",
    "gradient": "yellow",
    "output": "bright_yellow",
    "activation": "green",
    "temporary": "bright_magenta",
    "workspace": "red",
}


def print_estimate(
    console: Console, estimate: Estimate, limit: Limit | None = None, *, top: int = 10, depth: int | None = None
) -> None:
    """Print everything there is to say about an estimate."""
    for part in _parts(console, estimate, limit, top, depth):
        console.print(part)
        console.print()


def _parts(
    console: Console, estimate: Estimate, limit: Limit | None, top: int, depth: int | None
) -> Iterator[RenderableType]:
    yield headline(estimate, limit)
    yield share_table(console, "kind", breakdown.kind_rows(estimate), _COLOURS)
    yield share_table(console, "module", breakdown.module_rows(estimate, depth=depth, limit=top))
    if values := breakdown.value_rows(estimate, top):
        yield value_table(console, values)
    yield parameter_table(estimate)
    if estimate.notes:
        yield note_paragraphs(estimate)


def headline(estimate: Estimate, limit: Limit | None) -> Text:
    """The answer, before anything else."""
    lines = [
        Text(f"{breakdown.printable(estimate.model)}, {breakdown.step_words(estimate)}, on {estimate.device}"),
        Text(f"Batch {breakdown.batch_words(estimate) or 'without tensors'}"),
        Text.assemble("Peak ", (format_bytes(estimate.peak_bytes), "bold"), f" ({estimate.peak_bytes:,} bytes)"),
        Text(f"in the {breakdown.peak_place(estimate)}"),
    ]
    if estimate.reserved is not None:
        lines.append(Text(estimate.reserved.words()))
    if words := breakdown.range_words(estimate):
        lines.append(Text(words))
    if words := breakdown.loop_words(estimate):
        lines.append(Text(words))
    if limit is not None:
        style = "bold green" if limit.fits(estimate.needed_bytes) else "bold red"
        lines.append(Text(breakdown.verdict(estimate, limit), style=style))
    return Text("\n").join(lines)


def share_table(console: Console, part: str, rows: Sequence[Row], colours: dict[str, str] | None = None) -> Table:
    """Rows with bytes, percent and, where there is room, a bar."""
    with_bars = console.width >= _WIDTH_FOR_BARS
    table = plain_table(f"At the peak, by {part}")
    table.add_column(part, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    if with_bars:
        table.add_column("", no_wrap=True)
    largest = max((row.share for row in rows), default=1)
    for row in rows:
        colour = (colours or {}).get(row.label, "cyan")
        bar = [Text(_bar(console, row.share / largest), style=colour)] if with_bars else []
        table.add_row(Text(row.label), format_bytes(row.size_bytes), f"{row.share:.1%}", *bar)
    return table


def value_table(console: Console, rows: Sequence[ValueRow]) -> Table:
    """The biggest values: a column for each fact, or two lines a value where that is too wide."""
    table = plain_table("Biggest values at the peak")
    table.add_column("size", justify="right", no_wrap=True)
    if console.width >= _WIDTH_FOR_COLUMNS:
        for title in ("kind", "shape", "dtype", "made by", "source"):
            table.add_column(title, overflow="fold")
        for row in rows:
            facts = (row.kind, row.shape, row.dtype, row.place, row.source)
            table.add_row(format_bytes(row.size_bytes), *(Text(fact) for fact in facts))
        return table
    table.add_column("value", overflow="fold")
    for row in rows:
        first = Text(f"{row.kind} {row.shape} {row.dtype}", style=_COLOURS.get(row.kind, ""))
        second = Text("  ".join(filter(None, (row.place, row.source))))
        table.add_row(format_bytes(row.size_bytes), Text("\n").join([first, second]))
    return table


def parameter_table(estimate: Estimate) -> Table:
    """How many parameters there are, and what they take."""
    table = plain_table("Parameters")
    table.add_column("dtype", overflow="fold")
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for words, count, size_bytes in breakdown.parameter_rows(estimate):
        table.add_row(words, f"{count:,}", format_bytes(size_bytes))
    return table


def note_paragraphs(estimate: Estimate) -> Text:
    """What a reader should know about the figures."""
    return Text("\n").join(Text.assemble(("note: ", "bold"), note) for note in breakdown.note_lines(estimate))


def plain_table(title: str) -> Table:
    """A table without frames."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )


def _bar(console: Console, share: float) -> str:
    """A bar in eighths of a letter, never empty; in ASCII where the terminal has no more."""
    if not console.encoding.lower().startswith("utf"):
        return "#" * max(1, round(share * _BAR_WIDTH))
    full, eighths = divmod(max(1, round(share * _BAR_WIDTH * 8)), 8)
    return _EIGHTHS[8] * full + (_EIGHTHS[eighths] if eighths else "")
