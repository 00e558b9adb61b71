"""A diagnosis, or an explained message, for the terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.doctor.diagnosis import Diagnosis
from memfit.doctor.oom_text import OutOfMemoryMessage, advice_of, figures_of
from memfit.report import doctor_rows
from memfit.report.breakdown import printable
from memfit.report.doctor_rows import LineRow, SettingRow
from memfit.report.tables import plain_table
from memfit.units import format_bytes


def print_diagnosis(console: Console, diagnosis: Diagnosis, *, top: int = 10) -> None:
    """Print everything there is to say about a history."""
    for part in _parts(diagnosis, top):
        console.print(part)
        console.print()


def print_message(console: Console, message: OutOfMemoryMessage) -> None:
    """Print what the numbers of an out-of-memory message mean."""
    if message.messages > 1:
        console.print(Text(f"the last of {message.messages} messages"))
    table = plain_table("What the message says" + ("" if message.device is None else f", GPU {message.device}"))
    for title in ("what", "size", "meaning"):
        table.add_column(title, justify="right" if title == "size" else "left", no_wrap=title == "size")
    for figure in figures_of(message):
        table.add_row(figure.label, format_bytes(figure.size_bytes), figure.meaning)
    console.print(table)
    console.print()
    for sentence in advice_of(message):
        console.print(Text(sentence))


def _parts(diagnosis: Diagnosis, top: int) -> Iterator[RenderableType]:
    yield _headline(diagnosis)
    yield _line_table("At the peak, by line", doctor_rows.owner_rows(diagnosis, top))
    if never_freed := doctor_rows.never_freed_rows(diagnosis, top):
        yield _line_table("Never freed: asked for in the recording, there at its end", never_freed)
    yield _segment_table(diagnosis)
    yield _setting_table(doctor_rows.setting_rows(diagnosis))
    yield Text("\n").join(Text.assemble(("note: ", "bold"), note) for note in doctor_rows.notes(diagnosis))


def _headline(diagnosis: Diagnosis) -> Text:
    lines = [
        Text(printable(f"{diagnosis.history.name}: {doctor_rows.subtitle(diagnosis)}")),
        Text.assemble(
            *("Peak ", (format_bytes(diagnosis.peak_bytes), "bold"), " allocated, "),
            *((format_bytes(diagnosis.peak_reserved_bytes), "bold"), " reserved"),
        ),
        *(Text(f"- {finding}") for finding in doctor_rows.findings(diagnosis)),
    ]
    return Text("\n").join(lines)


def _line_table(title: str, rows: Sequence[LineRow]) -> Table:
    table = plain_table(title)
    table.add_column("line", overflow="fold")
    table.add_column("operators", overflow="fold")
    for name in ("blocks", "size", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row.line), Text(row.operators), f"{row.count:,}", format_bytes(row.size_bytes), f"{row.share:.1%}"
        )
    return table


def _segment_table(diagnosis: Diagnosis) -> Table:
    """Sum the segments of both pools at the peak."""
    table = plain_table("Segments at the peak")
    table.add_column("pool")
    for name in ("segments", "reserved", "not in use", "in one piece"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, is_small in (("large", False), ("small", True)):
        segments = [each for each in diagnosis.segments if each.is_small is is_small]
        figures = (
            sum(each.size_bytes for each in segments),
            sum(each.free_bytes for each in segments),
            max((each.largest_free_bytes for each in segments), default=0),
        )
        table.add_row(name, f"{len(segments):,}", *(format_bytes(each) for each in figures))
    return table


def _setting_table(rows: Sequence[SettingRow]) -> Table:
    table = plain_table("The same requests under other settings (simulated)")
    table.add_column("setting", overflow="fold")
    with_fits = any(row.fits is not None for row in rows)
    for name in ("reserved", "allocated", "saved", *(["fits"] if with_fits else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        label = f"{row.label} (as recorded)" if row.is_own else row.label
        saved = format_bytes(row.saved_bytes) if row.saved_bytes else "-"
        fits = ["yes" if row.fits else "no"] if with_fits else []
        style = "bold green" if row.is_best else ""
        figures = (format_bytes(row.reserved_bytes), format_bytes(row.allocated_bytes))
        table.add_row(Text(label, style=style), *figures, saved, *fits)
    return table
