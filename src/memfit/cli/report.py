"""`memfit report`: a plan as a page, a picture or a film."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli import options
from memfit.cli.progress import display
from memfit.cli.streams import interruptible
from memfit.errors import InvalidInput
from memfit.plan.plan import Plan
from memfit.report.write import report as write_report
from memfit.units import format_bytes

HELP = """Show a plan: a page with the timeline, an animation and tables, or the timeline as a picture.

The page is one file that loads nothing. It shows memory through the planned and the unplanned step on one axis, what is
live at every moment and which module owns it, what is kept, computed again, replaced and sent out, and, from the
files that `memfit frontier --output` and `memfit profile --json` write, the plan's place on the curve of memory
against time and predicted beside measured. Pictures and films need matplotlib (pip install "memfit[plots]").

\b
Exit codes:
  0  the report was written
  2  the plan or an option cannot be used, or the file is there already
"""

EXAMPLES = """\b
Examples:
\b
  memfit report plan.json
\b
  memfit report plan.json --frontier curve.json --profile profile.json \\
      --output report.html
\b
  memfit report plan.json --format svg --output figure.svg --force
"""


class Format(StrEnum):
    """What a report can be written as."""

    HTML = "html"
    PNG = "png"
    SVG = "svg"
    GIF = "gif"


def report(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", dir_okay=False, help="A plan that `memfit plan` wrote.")],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            dir_okay=False,
            help="Where to write the report.",
            show_default="beside the plan, with the ending of the format",
        ),
    ] = None,
    kind: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="The page, the timeline as a picture, or the animation as a film.",
            show_default="by the ending of --output, else html",
        ),
    ] = None,
    frontier: Annotated[
        Path | None,
        typer.Option(metavar="PATH", dir_okay=False, help="A curve that `memfit frontier --output` wrote."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="PATH", dir_okay=False, help="What `memfit profile --json` printed, in a file."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """The command; what it does is said in HELP."""
    target = output or plan.with_suffix(f".{kind or Format.HTML}")
    with interruptible():
        Plan.load(plan)  # a plan that cannot be read is said before a file is asked about
        overwrite = force or _may_overwrite(target)
        with display() as shown:
            shown.doing("drawing the report")
            write_report(plan, target, format=kind, frontier=frontier, profile=profile, overwrite=overwrite)
    size_bytes = target.stat().st_size
    if as_json:
        typer.echo(json.dumps({"report": str(target), "size_bytes": size_bytes}))
    else:
        typer.echo(f"{target} ({format_bytes(size_bytes)})")


def _may_overwrite(path: Path) -> bool:
    """Ask on a terminal; elsewhere a file that is there stays as it is."""
    if not path.exists():
        return False
    if sys.stdin.isatty() and typer.confirm(f"{path} is there already. Write over it?", err=True):
        return True
    raise InvalidInput(f"{str(path)!r} is there already and was left as it is; give another --output, or --force")
