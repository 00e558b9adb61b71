"""`memfit cache`: what is kept on disk between processes."""

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from memfit.cli import options
from memfit.errors import InvalidInput
from memfit.files import cache_folder
from memfit.kept import Kept, clear, kept
from memfit.report.breakdown import printable
from memfit.report.tables import plain_table
from memfit.units import format_bytes

HELP = """Show what memfit keeps on disk, and remove it.

Kept are what operators allocate and how long they take, plans that were fitted with remember=True, the graphs of
compiled stretches and where their kernels are; all of it is measured, planned or compiled again where it is missing.
It lies in MEMFIT_CACHE_DIR, or in the user's cache folder. The kernels themselves are in the cache of torch's Inductor,
which is left alone.

\b
Exit codes:
  0  all is well
  2  an option cannot be used, or a file cannot be removed
"""

EXAMPLES = """\b
Examples:
\b
  memfit cache
\b
  memfit cache --clear --unused-for 30
"""


def cache(
    remove: Annotated[bool, typer.Option("--clear", help="Remove what is kept.")] = False,
    unused_for: Annotated[
        float | None, typer.Option(metavar="DAYS", help="Remove only what was not used for so long.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show or remove what is kept."""
    if unused_for is not None and not remove:
        raise InvalidInput("--unused-for says what --clear removes; give both")
    if unused_for is not None and not unused_for >= 0:
        raise InvalidInput(f"--unused-for is a number of days, {unused_for:g} was given")
    try:
        found = clear(unused_days=unused_for or 0.0) if remove else kept()
    except OSError as error:
        raise InvalidInput(f"what is kept in {cache_folder()} cannot be looked at or removed: {error}") from error
    if as_json:
        kinds = [dataclasses.asdict(each) for each in found]
        typer.echo(json.dumps({"folder": str(cache_folder()), "removed": remove, "kinds": kinds}, indent=2))
        return
    _print(Console(), found, removed=remove)


def _print(console: Console, found: list[Kept], *, removed: bool) -> None:
    console.print(Text(printable(f"{'removed from' if removed else 'kept in'} {cache_folder()}")), soft_wrap=True)
    table = plain_table("")
    for title in ("what", "files", "size", "last used"):
        table.add_column(title, justify="left" if title == "what" else "right", no_wrap=True)
    for each in found:
        table.add_row(each.kind, str(each.files), format_bytes(each.size_bytes), _when(each.unused_days))
    files, size_bytes = sum(each.files for each in found), sum(each.size_bytes for each in found)
    table.add_row("together", str(files), format_bytes(size_bytes), "")
    console.print(table)


def _when(unused_days: float | None) -> str:
    """How long ago, in words.

    >>> _when(0.2), _when(1.0), _when(12.7), _when(None)
    ('today', '1 day ago', '12 days ago', '')
    """
    if unused_days is None:
        return ""
    days = int(unused_days)
    return "today" if days == 0 else f"{days} day{'s' if days > 1 else ''} ago"
