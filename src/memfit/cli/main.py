"""The command line: `memfit estimate --model torchvision.models.resnet50 --input 16x3x224x224`.

Exit codes: 0 all is well, 1 it does not fit the device (`estimate`), 2 what was given cannot be
used, 3 no plan fits the budget, 4 a planned step is not what it should be (`check`, `profile`, `demo`,
`zoo verify`), 70 a bug in memfit, 130 interrupted before there was a result.
"""

import contextlib
import importlib
import importlib.metadata
import logging
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from memfit.cli.streams import INTERRUPTED
from memfit.errors import InfeasibleBudget, MemfitError

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

VERBS = {  # by name: the file, what help texts there begin with, and the help of the list
    "estimate": ("estimate", "", "Predict the peak memory of one training step."),
    "plan": ("plan", "", "Find the fastest training step under a budget."),
    "check": ("prove", "CHECK_", "Compare a planned step with the eager one."),
    "profile": ("prove", "PROFILE_", "Measure peak and time of a planned step."),
    "frontier": ("frontier", "", "The whole curve of memory against time."),
    "report": ("report", "", "Show a plan: a page, a picture or a film."),
    "doctor": ("doctor", "", "Explain a GPU's memory snapshot or an out-of-memory error."),
    "zoo": ("zoo", "", "Plans that are there already."),
    "cache": ("cache", "", "What is kept on disk, and how to remove it."),
    "demo": ("demo", "", "ResNet-50 and GPT-2 in half of their activation memory, in a minute."),
}


class _Verb(TyperCommand):
    """A verb whose file is imported when it is asked for: torch takes seconds."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Begin the verb itself."""
        assert self.name is not None
        return _verb(self.name).make_context(*args, **kwargs)


class _Verbs(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, _, short_help) in VERBS.items():
            self.add_command(_Verb(name, short_help=short_help))


def _verb(name: str) -> Any:
    file, texts, short_help = VERBS[name]
    module = importlib.import_module(f"memfit.cli.{file}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        help_text, examples = getattr(module, f"{texts}HELP"), getattr(module, f"{texts}EXAMPLES")
        app.command(name=name, short_help=short_help, help=help_text, epilog=examples)(getattr(module, name))
    return typer.main.get_command(app)


app = typer.Typer(
    name="memfit",
    cls=_Verbs,
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
    from memfit.report.breakdown import printable  # not before there is something to say: it takes a while

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
