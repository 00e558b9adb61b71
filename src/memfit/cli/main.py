"""The command line: `memfit estimate --model torchvision.models.resnet50 --input 16x3x224x224`.

Exit codes: 0 it fits or no device was asked about, 1 it does not fit, 2 what was given cannot
be used, 70 a bug in memfit, 130 interrupted.
"""

import contextlib
import importlib.metadata
import json
import sys
import traceback
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console

from memfit import api
from memfit.capture.fakes import without_weights
from memfit.cli import reference as references
from memfit.cli.models import find_model, parse_model
from memfit.cli.progress import Display, display
from memfit.cli.reference import Reference
from memfit.cli.samples import Input, build_sample, call_sample, parse_inputs, parse_sample
from memfit.errors import InvalidInput, InvalidSample, MemfitError
from memfit.estimate import Estimate
from memfit.files import write_atomically
from memfit.report import page
from memfit.report.breakdown import automatic_depth, printable
from memfit.report.limit import Limit
from memfit.report.tables import print_estimate

DOES_NOT_FIT, INVALID, BUG, INTERRUPTED = 1, 2, 70, 130

app = typer.Typer(
    name="memfit",
    help="Train any PyTorch model inside the memory you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes leave too little room for words, and would read "[name=]" as a style
)


class FloatType(StrEnum):
    """What parameters can be made of."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def run() -> None:
    """The program: like `app`, with errors as one paragraph and the exit codes above."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may lack a letter
    try:
        app()
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


_ESTIMATE_HELP = """Predict the peak memory of one training step, and show what it is made of.

The model is built without memory for its weights and is not run, so it may be bigger than this machine.

\b
Exit codes:
  0  the step fits the device, or no device was asked about
  1  the step does not fit the device
  2  the model, the sample or an option cannot be used
"""

_ESTIMATE_EXAMPLES = """\b
Examples:
\b
  memfit estimate --model torchvision.models.resnet50 --input 16x3x224x224
\b
  memfit estimate --model "transformers:LlamaForCausalLM()" \\
      --dtype bfloat16 --device A100-80GB \\
      --input input_ids=1x2048:int64 --input labels=1x2048:int64
\b
  memfit estimate --model "./net.py:make_model(width=64)" \\
      --sample ./net.py:make_batch --optimizer sgd \\
      --device 24GiB --html report.html
"""


@app.command(
    name="estimate",
    short_help="Predict the peak memory of one training step.",
    help=_ESTIMATE_HELP,
    epilog=_ESTIMATE_EXAMPLES,
)
def _estimate(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="A class or function that makes the model, by name, with literal arguments: "
            '"package.module:callable(1, flag=True)", torchvision.models.resnet50 or ./file.py:callable.',
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE",
            help="One argument of the model's forward, as [name=]shape[:dtype]; give it once for each argument: "
            "16x3x224x224, ids=1x2048:int64.",
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A function without arguments that makes the sample: ./file.py:make_batch."),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help='A name in torch.optim; "none" for forward and backward only.')
    ] = "adamw",
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME|BYTES", help="What the step has to fit: a device (A100-40GB) or bytes (24GiB)."),
    ] = None,
    dtype: Annotated[FloatType | None, typer.Option(help="What parameters and inputs are made of.")] = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Run each distinct operator once, to count what it allocates inside.",
            show_default="where the step could run here",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", dir_okay=False, help="Write a report page to this file.")
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="How many modules and values to show.")] = 10,
    depth: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="How many names deep to look into modules.",
            show_default="where it tells something",
        ),
    ] = None,
) -> None:
    limit = None if device is None else Limit.of(device)
    request = parse_model(model), _parse_sample(inputs or [], sample)
    kind = None if dtype is None else getattr(torch, dtype.value)
    optimizer_name = None if optimizer.lower() == "none" else optimizer
    with _interruptible():
        with _only_results_on_stdout(), display() as shown:
            result = _estimated(*request, kind, optimizer_name, limit, measure, shown)
        if html is not None:
            _write_page(html, page.render(result, limit, top=top, depth=depth))
        if as_json:
            typer.echo(_json(result, limit, depth=depth or automatic_depth(result), top=top))
        else:
            print_estimate(Console(), result, limit, top=top, depth=depth)
    if limit is not None and not limit.fits(result.peak_bytes):
        raise typer.Exit(DOES_NOT_FIT)


def _parse_sample(inputs: list[str], sample: str | None) -> tuple[Input, ...] | Reference:
    if inputs and sample is not None:
        raise InvalidSample("both --input and --sample are given; give the shapes or the function, not both")
    if sample is not None:
        return parse_sample(sample)
    if not inputs:
        raise InvalidSample(
            "there is no sample; give the shapes the model's forward takes, such as --input 16x3x224x224, "
            "or a function that makes them, such as --sample ./file.py:make_batch"
        )
    return parse_inputs(inputs)


def _estimated(
    model_name: Reference,
    wanted: tuple[Input, ...] | Reference,
    dtype: torch.dtype | None,
    optimizer: str | None,
    limit: Limit | None,
    measure: bool | None,
    shown: Display,
) -> Estimate:
    shown.doing("building the model")
    factory = find_model(model_name)
    make_sample = references.load(wanted) if isinstance(wanted, Reference) else None
    with without_weights():  # one context for both: tensors of two cannot meet
        model = factory.build(dtype)
        if isinstance(wanted, Reference):
            sample = call_sample(wanted, make_sample, dtype)
        else:
            sample = build_sample(wanted, dtype)
    shown.doing("tracing a training step")
    device = limit.label if limit is not None and limit.is_device else None
    return api.estimate(model, sample, optimizer=optimizer, device=device, measure=measure, progress=shown.measured)


@contextlib.contextmanager
def _only_results_on_stdout() -> Iterator[None]:
    """What the user's modules print goes to stderr: stdout is for the answer."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _write_page(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise InvalidInput(
            f"the report could not be written to {str(path)!r} ({error.strerror or error}); give another --html path"
        ) from None


def _json(result: Estimate, limit: Limit | None, *, depth: int, top: int) -> str:
    verdict = {
        "fits": None if limit is None else limit.fits(result.peak_bytes),
        "device_usable_bytes": None if limit is None else limit.usable_bytes,
    }
    return json.dumps(result.to_dict(depth=depth, top=top) | verdict, indent=2)
