"""`memfit demo`: two well-known models in half of their activation memory, planned and eager side by side."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from memfit.cli import options
from memfit.cli.demo_case import CASES, DemoCase, Result, run_case
from memfit.cli.progress import display
from memfit.cli.streams import check_writable, interruptible, only_results_on_stdout, write_file
from memfit.errors import InvalidModel
from memfit.report import page
from memfit.report.limit import Limit
from memfit.report.tables import plain_table
from memfit.units import format_bytes

NOT_AS_PROMISED = 4

HELP = """Train ResNet-50 and GPT-2 in half of their activation memory, beside the eager run.

For each: estimate, plan, then a few training steps planned and eager from the same weights and seeds. The table says
what was measured. The report of each model is written to --folder. ResNet-50 needs torchvision, GPT-2 transformers;
what is not installed is left out.

\b
Exit codes:
  0  peaks within the budgets (up to 1%), gradients equal bit for bit
  2  neither torchvision nor transformers is installed
  4  a promise was not kept
"""

EXAMPLES = """\b
Examples:
\b
  memfit demo
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
            metavar="MODEL", help="One of the models alone.", autocompletion=options.completing(c.name for c in CASES)
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Training steps, each planned and eager.")] = 3,
    time_limit: options.TimeLimit = 4.0,
    seed: options.Seed = 0,
    force: options.Force = False,
) -> None:
    """The command; what it does is said in HELP."""
    cases = [each for each in CASES if only is None or each.name.lower() == only.lower()]
    if not cases:
        raise InvalidModel(f"the demo has no {only!r}; it has {' and '.join(each.name for each in CASES)}")
    for case in cases:
        check_writable(_report_path(folder, case), force=force, option="--folder: the report")
    results: list[Result] = []
    with interruptible(), only_results_on_stdout(), display(time_limit) as shown:
        for case in cases:
            if not case.is_installed:
                shown.note(f"{case.name} is left out: {case.package} is not installed (pip install 'memfit[models]')")
                continue
            result = run_case(case, steps=steps, time_limit_s=time_limit, seed=seed, shown=shown)
            limit = Limit.of(str(result.budget_bytes))
            write_file(
                _report_path(folder, case), page.render(result.estimate, limit), noun="report", option="--folder"
            )
            results.append(result)
    if not results:
        raise InvalidModel("neither torchvision nor transformers is installed; pip install 'memfit[models]'")
    print_results(Console(), results)
    for result in results:
        typer.echo(f"report: {_report_path(folder, result.case)}")
    if not all(each.kept_promises for each in results):
        raise typer.Exit(NOT_AS_PROMISED)


def print_results(console: Console, results: list[Result]) -> None:
    """What was promised and what was measured, a column for each model."""
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


def _report_path(folder: Path, case: DemoCase) -> Path:
    return folder / f"{case.name.lower()}.html"
