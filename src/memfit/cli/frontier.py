"""`memfit frontier`: the whole curve of memory against time."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from memfit import api
from memfit.cli import options
from memfit.cli.planning import built_for_planning
from memfit.cli.progress import Display, display
from memfit.cli.streams import check_writable, interruptible, only_results_on_stdout, write_file
from memfit.cli.subject import Subject
from memfit.cli.wishes import Wishes
from memfit.errors import InvalidInput
from memfit.plan.frontier import Frontier
from memfit.plan.plan import Plan
from memfit.report.frontier_lines import FrontierLines

_FRACTIONS = "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1"

HELP = """Plan a training step at several budgets, down to the smallest there is.

Budgets are fractions of the activation part: what the unplanned peak has beyond what lives when the step ends.
Ctrl-C ends the curve where it is; what was found is printed and written.

\b
Exit codes:
  0  the curve was found, or the part of it before Ctrl-C
  2  the model, the sample or an option cannot be used
"""

EXAMPLES = """\b
Examples:
\b
  memfit frontier --model torchvision.models.resnet50 --input 16x3x128x128
\b
  memfit frontier --model torchvision.models.resnet50 --input 64x3x224x224 \\
      --device A100-40GB --fractions 0.8,0.6,0.4 --output curve.json
"""


def frontier(
    model: options.Model,
    inputs: options.Inputs = None,
    sample: options.SampleName = None,
    fractions: Annotated[
        str, typer.Option(metavar="SHARES", help="Of the activation part, separated by commas.")
    ] = _FRACTIONS,
    optimizer: options.OptimizerName = "none",
    allow: options.Allow = None,
    recompute: options.Recompute = None,
    keep: options.Keep = None,
    outputs: options.Outputs = "all",
    device: options.DeviceName = None,
    time_limit: options.TimeLimit = 60.0,
    dtype: options.DType = None,
    measure: options.Measure = None,
    seed: options.Seed = 0,
    output: Annotated[
        Path | None, typer.Option(metavar="PATH", dir_okay=False, help="Write the curve as JSON to this file.")
    ] = None,
    force: options.Force = False,
    as_json: options.AsJson = False,
) -> None:
    """The command; what it does is said in HELP."""
    subject = Subject.of(model, inputs, sample, dtype)
    wishes = Wishes.of(
        optimizer=optimizer,
        allow=allow,
        recompute=recompute,
        keep=keep,
        outputs=outputs,
        device=device,
        time_limit=time_limit,
    )
    shares = parse_fractions(fractions)
    check_writable(output, force=force, option="--output")
    lines = None if as_json else FrontierLines(Console(file=sys.stdout))
    with interruptible():
        with only_results_on_stdout(), display() as shown:
            curve = _curve(subject, wishes, shares, measure, seed, lines, shown)
        if output is not None:
            write_file(output, curve.to_json(), noun="curve", option="--output")
        if as_json:
            typer.echo(curve.to_json())


def parse_fractions(text: str) -> tuple[float, ...]:
    """Read numbers separated by commas.

    >>> parse_fractions("0.8, 0.6")
    (0.8, 0.6)
    """
    try:
        shares = tuple(float(each) for each in text.split(","))
    except ValueError:
        raise InvalidInput(f"--fractions {text!r} are not numbers; write for example 0.8,0.6,0.4") from None
    wrong = [share for share in shares if not 0 < share <= 1]
    if wrong:
        raise InvalidInput(f"--fractions are above 0 and at most 1, {wrong[0]:g} was given; write 0.8,0.6,0.4")
    return shares


def _curve(
    subject: Subject,
    wishes: Wishes,
    shares: tuple[float, ...],
    measure: bool | None,
    seed: int,
    lines: FrontierLines | None,
    shown: Display,
) -> Frontier:
    plans: list[Plan] = []

    def show(plan: Plan) -> None:
        plans.append(plan)
        if lines is not None:
            with shown.hidden():
                lines.add(plan)
        shown.planned(len(plans), len(shares) + 1)

    model, sample = built_for_planning(subject, wishes, measure, seed, shown)
    shown.doing("tracing a training step")
    curve = api.frontier(model, sample, fractions=shares, **wishes.keywords(), report=show, progress=shown.measured)
    if len(plans) < len(shares) + 1:
        why = ", the search was interrupted" if plans and plans[-1].was_interrupted else ""
        shown.note(f"{len(plans)} of {len(shares) + 1} budgets have a plan{why}")
    if lines is not None:
        lines.end()
    return curve
