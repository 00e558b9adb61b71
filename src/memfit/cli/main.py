"""The command line: `memfit estimate --model torchvision.models.resnet50 --input 16x3x224x224`.

Exit codes: 0 all is well, 1 it does not fit the device (`estimate`), 2 what was given cannot be
used, 3 no plan fits the budget, 4 a planned step is not what it should be (`check`, `profile`, `demo`,
`zoo verify`), 70 a bug in memfit, 130 interrupted before there was a result.
"""

import contextlib
import importlib.metadata
import logging
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from memfit.cli import cache, demo, doctor, estimate, frontier, plan, prove, report, zoo
from memfit.cli.streams import INTERRUPTED
from memfit.errors import InfeasibleBudget, MemfitError
from memfit.report.breakdown import printable

INVALID, INFEASIBLE, BUG = 2, 3, 70

# Libraries that models come from say at import what they lack for devices that are not here.
_TALKATIVE = ("torchao", "torch.utils._pytree")

EPILOG = """\b
How models and samples are named:
  --model torchvision.models.resnet50
  --model "package.module:callable(1, flag=True)"
  --model ./file.py:callable
  --input 16x3x224x224
  --input input_ids=4x128:int64
  --sample ./file.py:make_batch
\b
Examples:
  memfit estimate --model torchvision.models.resnet50 --input 16x3x224x224
  memfit plan --model torchvision.models.resnet50 --input 16x3x224x224 \\
      --budget 2GiB --output plan.json
  memfit doctor snapshot.pickle
  memfit zoo list
  memfit demo
\b
Exit codes:
  0    all is well; the best so far, if Ctrl-C ended a search
  1    estimate: the step does not fit the device
  2    the model, the sample, the plan or an option cannot be used
  3    no plan fits the budget; the smallest that was found is said
  4    a planned step or a stored plan is not what it should be
  70   a bug in memfit
  130  interrupted before there was a result
\b
Answers are on stdout, everything else on stderr. Where these are no terminals
they are plain text. `memfit --install-completion` teaches your shell.
"""

app = typer.Typer(
    name="memfit",
    help="Train any PyTorch model inside the memory you have.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes leave too little room for words, and would read "[name=]" as a style
)


def run() -> None:
    """The program: like `app`, with errors as one paragraph and the exit codes above."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may lack a letter
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        app(prog_name="memfit")
    except InfeasibleBudget as error:
        _exit_with(INFEASIBLE, str(error))
    except MemfitError as error:
        _exit_with(INVALID, str(error))
    except KeyboardInterrupt:
        _exit_with(INTERRUPTED, "interrupted")
    except Exception:
        # Not 1, which Python would exit with: a script would take that for "does not fit".
        traceback.print_exc()
        _exit_with(BUG, "this is a bug in memfit; please report it with the lines above")


def _exit_with(code: int, message: str) -> NoReturn:
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(printable(" ".join(message.split())), err=True)
    sys.exit(code)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"memfit {importlib.metadata.version('memfit')}")
        raise typer.Exit


@app.callback()
def _memfit(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train any PyTorch model inside the memory you have."""


app.command(
    name="estimate",
    short_help="Predict the peak memory of one training step.",
    help=estimate.HELP,
    epilog=estimate.EXAMPLES,
)(estimate.estimate)
app.command(
    name="plan",
    short_help="Find the fastest training step under a budget.",
    help=plan.HELP,
    epilog=plan.EXAMPLES,
)(plan.plan)
app.command(
    name="check",
    short_help="Compare a planned step with the eager one.",
    help=prove.CHECK_HELP,
    epilog=prove.CHECK_EXAMPLES,
)(prove.check)
app.command(
    name="profile",
    short_help="Measure peak and time of a planned step.",
    help=prove.PROFILE_HELP,
    epilog=prove.PROFILE_EXAMPLES,
)(prove.profile)
app.command(
    name="frontier",
    short_help="The whole curve of memory against time.",
    help=frontier.HELP,
    epilog=frontier.EXAMPLES,
)(frontier.frontier)
app.command(
    name="report",
    short_help="Show a plan: a page, a picture or a film.",
    help=report.HELP,
    epilog=report.EXAMPLES,
)(report.report)
app.command(
    name="doctor",
    short_help="Explain a GPU's memory snapshot or an out-of-memory error.",
    help=doctor.HELP,
    epilog=doctor.EXAMPLES,
)(doctor.doctor)
app.add_typer(zoo.app, name="zoo", short_help="Plans that are there already.")
app.command(
    name="cache",
    short_help="What is kept on disk, and how to remove it.",
    help=cache.HELP,
    epilog=cache.EXAMPLES,
)(cache.cache)
app.command(
    name="demo",
    short_help="ResNet-50 and GPT-2 in half of their activation memory, in a minute.",
    help=demo.HELP,
    epilog=demo.EXAMPLES,
)(demo.demo)
