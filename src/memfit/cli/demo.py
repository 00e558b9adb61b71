"""`memfit demo`: a model inside a hard limit, then two well-known ones in half of their activation memory."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from memfit.cli import options
from memfit.cli.demo_case import CASES, DemoCase, Result, run_case
from memfit.cli.demo_limit import CASE as LIMITED
from memfit.cli.demo_limit import LimitCase, LimitResult, print_limited, run_limited
from memfit.cli.progress import display
from memfit.cli.streams import check_writable, interruptible, only_results_on_stdout, write_file
from memfit.errors import InvalidModel
from memfit.report import page
from memfit.report.limit import Limit
from memfit.report.tables import plain_table
from memfit.units import format_bytes

NOT_AS_PROMISED = 4

HELP = """Train inside a hard limit in which plain PyTorch fails, then ResNet-50 and GPT-2 beside the eager run.

First a Transformer in processes of its own: plain PyTorch without a limit, plain PyTorch under RLIMIT_DATA, and memfit
under the same limit, planning included. That needs Linux. Then ResNet-50 and GPT-2 in half of their activation
memory: estimate, plan, and a few training steps planned and eager from the same weights and seeds. Tables say what was
measured; the figures of the first and a report of each other model are written to --folder. ResNet-50 needs
torchvision, GPT-2 transformers; what is not installed is left out.

\b
Exit codes:
  0  plain PyTorch fails in the limit and memfit does not, losses and weights equal bit for bit;
     peaks within the budgets (up to 1%), gradients equal bit for bit
  2  nothing of it can run here
  4  a promise was not kept
"""

EXAMPLES = """\b
Examples:
\b
  memfit demo
\b
  memfit demo --only Transformer    # the hard limit alone
\b
  memfit demo --only ResNet-50 --folder reports --force
"""


def demo(
    folder: Annotated[Path, typer.Option(metavar="PATH", file_okay=False, help="Where reports are written.")] = Path(
        "memfit-demo"
    ),
    only: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="One of the models alone.",
            autocompletion=options.completing(c.name for c in (LIMITED, *CASES)),
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Training steps, each planned and eager.")] = 3,
    time_limit: options.TimeLimit = 4.0,
    seed: options.Seed = 0,
    force: options.Force = False,
) -> None:
    """The command; what it does is said in HELP."""
    cases = _chosen(only)
    for case in cases:
        check_writable(_path(folder, case), force=force, option="--folder: the report")
    console = Console(file=sys.stdout)  # of the answers, before stdout is kept from others
    results: list[Result | LimitResult] = []
    with interruptible(), only_results_on_stdout(), display(time_limit) as shown:
        for case in cases:
            if case.missing:
                shown.note(f"{case.name} is left out: {case.missing}")
                continue
            if isinstance(case, DemoCase):
                result = run_case(case, steps=steps, time_limit_s=time_limit, seed=seed, shown=shown)
                text = page.render(result.estimate, Limit.of(str(result.budget_bytes)))
                results.append(result)
            else:
                limited = run_limited(case, steps=steps, time_limit_s=time_limit, seed=seed, shown=shown)
                text = limited.to_json()
                results.append(limited)
                with shown.hidden():
                    print_limited(console, limited)
            write_file(_path(folder, case), text, noun="report", option="--folder")
    if not results:
        raise InvalidModel("nothing of the demo can run here; pip install 'memfit[models]'")
    print_results(console, [each for each in results if isinstance(each, Result)])
    for each in results:
        typer.echo(f"report: {_path(folder, each.case)}")
    if not all(each.kept_promises for each in results):
        raise typer.Exit(NOT_AS_PROMISED)


def _chosen(only: str | None) -> list[LimitCase | DemoCase]:
    """All cases, or the one of a name."""
    cases: list[LimitCase | DemoCase] = [LIMITED, *CASES]
    chosen = [each for each in cases if only is None or each.name.lower() == only.lower()]
    if not chosen:
        *others, last = (each.name for each in cases)
        raise InvalidModel(f"the demo has no {only!r}; it has {', '.join(others)} and {last}")
    return chosen


def print_results(console: Console, results: list[Result]) -> None:
    """What was promised and what was measured, a column for each model."""
    if not results:
        return
    table = plain_table("Half of the activation memory, planned beside eager")
    table.add_column("", no_wrap=True)
    for result in results:
        table.add_column(f"{result.case.name} x{result.case.batch_size}", justify="right", no_wrap=True)
    rows = {
        "estimated peak, unplanned": [format_bytes(each.estimate.peak_bytes) for each in results],
        "budget": [format_bytes(each.budget_bytes) for each in results],
        "measured peak, eager": [format_bytes(each.eager_peak_bytes) for each in results],
        "measured peak, planned": [format_bytes(each.planned_peak_bytes) for each in results],
        "predicted peak, planned": [format_bytes(each.plan.peak_bytes) for each in results],
        "within the budget": ["yes" if each.fits else "NO" for each in results],
        "predicted slowdown": [f"{each.plan.slowdown:+.1%}" for each in results],
        "measured slowdown": [f"{each.slowdown:+.1%}" for each in results],
        "loss after the last step": [f"{each.last_loss:.4f}" for each in results],
        "equal gradients": ["yes" if each.equal else "NO" for each in results],
    }
    for label, cells in rows.items():
        table.add_row(label, *(Text(cell, style="bold red" if cell == "NO" else "") for cell in cells))
    console.print(table)


def _path(folder: Path, case: LimitCase | DemoCase) -> Path:
    """Return where the report of a case is written, or its figures."""
    return folder / f"{case.name.lower()}.{'html' if isinstance(case, DemoCase) else 'json'}"
