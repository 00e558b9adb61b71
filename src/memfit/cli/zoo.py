"""`memfit zoo`: plans that are there already."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from memfit import zoo
from memfit.cli import options
from memfit.cli.progress import display
from memfit.cli.streams import INTERRUPTED, check_writable, interruptible, only_results_on_stdout, write_file
from memfit.cli.zoo_build import build, subject_of
from memfit.cli.zoo_tables import print_entries, print_verdicts, verdict_words
from memfit.errors import InvalidInput
from memfit.measure.devices import find_device
from memfit.report.plan_summary import summary_json
from memfit.report.plan_tables import print_plan
from memfit.spelling import suggestion
from memfit.zoo.catalog import CASES

DOES_NOT_HOLD = 4

HELP = """Plans of well-known models at several budgets and devices, made already.

\b
Exit codes:
  0  all is well
  2  there is no such plan, model or device
  4  verify: a plan is not what it says
  130  verify: interrupted; what was found until then is printed
"""

EXAMPLES = """\b
Examples:
\b
  memfit zoo list resnet50
\b
  memfit zoo show resnet50-x16-cpu-0.50 --output plan.json
\b
  memfit zoo verify
"""

app = typer.Typer(
    name="zoo", help=HELP, epilog=EXAMPLES, no_args_is_help=True, rich_markup_mode=None, add_completion=False
)


def _complete_model(incomplete: str) -> list[str]:
    return options.completing(sorted({each.model for each in zoo.entries()}))(incomplete)


def _complete_plan(incomplete: str) -> list[str]:
    return options.completing(each.name for each in zoo.entries())(incomplete)


@app.command(name="list", short_help="What there is.", epilog="\b\nExample:\n  memfit zoo list gpt2 --device A100-40GB")
def list_plans(
    model: Annotated[str | None, typer.Argument(help="Of this model alone.", autocompletion=_complete_model)] = None,
    device: options.DeviceName = None,
    as_json: options.AsJson = False,
) -> None:
    """List the plans there are: predicted peak, what is saved, predicted slowdown."""
    found = _chosen(model, device)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(each) for each in found], indent=2))
    else:
        print_entries(Console(), found)


@app.command(
    short_help="One plan, or write it to a file.",
    epilog="\b\nExample:\n  memfit zoo show resnet50-x16-cpu-0.50 --output plan.json",
)
def show(
    name: Annotated[str, typer.Argument(help="The name of a plan.", autocompletion=_complete_plan)],
    output: Annotated[
        Path | None, typer.Option(metavar="PATH", dir_okay=False, help="Write the plan to this file.")
    ] = None,
    force: options.Force = False,
    as_json: options.AsJson = False,
    top: options.Top = 20,
    depth: options.Depth = None,
) -> None:
    """Show a plan and the options that name its step; with --output write it as `memfit plan` does."""
    entry = zoo.find_entry(name)
    check_writable(output, force=force, option="--output")
    plan = zoo.open_plan(name)
    if output is not None:
        write_file(output, plan.to_json(), noun="plan", option="--output")
    if as_json:
        typer.echo(summary_json(plan, depth=depth))
        return
    console = Console()
    print_plan(console, plan, top=top, depth=depth)
    console.print(Text(f"step: {entry.command()}"), soft_wrap=True)


@app.command(
    short_help="Check that stored plans are what they say.",
    epilog="\b\nExample:\n  memfit zoo verify resnet50-x16-cpu-0.50",
)
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="Plans; without, all of them.", autocompletion=_complete_plan)
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Capture every model again, without weights, and compare graph and simulated peak with the stored plans.

    Models come from torchvision and transformers, which must be installed.
    """
    wanted = [zoo.find_entry(name) for name in names] if names else list(zoo.entries())
    found: list[zoo.Verdict] = []
    with interruptible():
        interrupted = False
        with only_results_on_stdout(), display() as shown:
            shown.checked(0, len(wanted))
            try:
                for verdict in zoo.verify(wanted, lambda entry: subject_of(entry).without_weights()):
                    found.append(verdict)
                    shown.checked(len(found), len(wanted))
            except KeyboardInterrupt:
                interrupted = True
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(each) | {"holds": each.holds} for each in found], indent=2))
        else:
            print_verdicts(Console(), found, of=len(wanted))
    if interrupted:
        typer.echo(f"interrupted: {verdict_words(found, of=len(wanted))}", err=True)
        raise typer.Exit(INTERRUPTED)
    if not all(each.holds for each in found):
        raise typer.Exit(DOES_NOT_HOLD)


@app.command(
    name="build",
    short_help="Make the plans that are missing.",
    epilog="\b\nExample:\n  memfit zoo build src/memfit/zoo/plans --only resnet50",
)
def build_plans(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Where plans and their list are.")],
    only: Annotated[list[str] | None, typer.Option(metavar="MODEL", help="Cases of this model alone.")] = None,
    device: options.DeviceName = None,
    again: Annotated[bool, typer.Option("--again", help="Make those that are there again.")] = False,
    time_limit: options.TimeLimit = 6.0,
    seed: options.Seed = 0,
) -> None:
    """Make the plans of the catalogue that a folder lacks; stopped and run again, it goes on where it stood.

    --time-limit is for each budget. Plans for the CPU rest on operators timed here: run it on an idle machine.
    """
    cases = [each for each in CASES if not only or each.name in only]
    if not cases:
        known = sorted({each.name for each in CASES})
        assert only
        raise InvalidInput(f"the catalogue has no {only[0]!r}{suggestion(only[0], known)}; it has {', '.join(known)}")
    if device is not None:
        name = _device_name(device)
        cases = [dataclasses.replace(each, devices=(name,)) for each in cases if name in each.devices]
    with interruptible(), only_results_on_stdout(), display() as shown:
        build(
            cases,
            folder,
            time_limit_s=time_limit,
            seed=seed,
            again=again,
            shown=shown,
            report=lambda text: shown.note(f"stored: {text}"),
        )


def _chosen(model: str | None, device: str | None) -> list[zoo.Entry]:
    found = list(zoo.entries())
    if model is not None:
        known = sorted({each.model for each in found})
        if model not in known:
            raise InvalidInput(f"the zoo has no {model!r}{suggestion(model, known)}; it has {', '.join(known)}")
        found = [each for each in found if each.model == model]
    if device is not None:
        found = [each for each in found if each.device == _device_name(device)]
    return found


def _device_name(device: str) -> str:
    return "cpu" if device.lower() == "cpu" else find_device(device).name
