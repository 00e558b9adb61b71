"""`memfit doctor`: what a memory snapshot of a GPU, or an out-of-memory message, says."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from memfit.cli import options
from memfit.cli.fitting_plan import Trained, trained
from memfit.cli.streams import check_writable, interruptible, write_file
from memfit.doctor.diagnosis import diagnose
from memfit.doctor.oom_text import read_message
from memfit.doctor.read import is_history, read_file, read_histories, unpacked
from memfit.errors import InvalidInput
from memfit.plan.allocator.history import MemoryHistory
from memfit.plan.allocator.requests import USUAL_SETTINGS
from memfit.plan.allocator.settings import AllocatorSettings
from memfit.report import doctor_page
from memfit.report.doctor_json import diagnosis_data, message_data
from memfit.report.doctor_tables import print_diagnosis, print_message

HELP = """Explain a memory snapshot of a GPU, or the text of an out-of-memory error.

A snapshot is what torch.cuda.memory._dump_snapshot wrote, or the same as JSON. It is read as plain data: nothing in it
is run, and a file that names classes is refused. Shown are the peak and the lines of code that hold it, what is never
freed, how segments are cut up, and what other allocator settings would reserve, by a simulation of the allocator that
is compared with the recording event by event. No GPU is needed.

\b
Exit codes:
  0  the file was read and explained
  2  the file or an option cannot be used
"""

EXAMPLES = """\b
Examples:
\b
  memfit doctor snapshot.pickle
\b
  memfit doctor snapshot.pickle --html snapshot.html \\
      --setting max_split_size_mb:256
\b
  python train.py 2>&1 | memfit doctor -
\b
  memfit doctor error.txt --model torchvision.models.resnet50 \\
      --input 256x3x224x224 --optimizer sgd --device "RTX 3060"
"""


def doctor(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", allow_dash=True, help="A snapshot, or a text with the error; - reads stdin."),
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", dir_okay=False, help="Write a page to this file.")
    ] = None,
    gpu: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Which GPU of the snapshot.", show_default="the one with most memory reserved"
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONF",
            help="Another setting to simulate, as PYTORCH_CUDA_ALLOC_CONF takes it. May be given several times.",
        ),
    ] = None,
    model: options.MaybeModel = None,
    inputs: options.Inputs = None,
    sample: options.SampleName = None,
    optimizer: options.OptimizerName = "none",
    dtype: options.DType = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="The GPU, with --model: which plan would have fitted it.")
    ] = None,
    as_json: options.AsJson = False,
    force: options.Force = False,
    top: options.Top = 10,
) -> None:
    """See HELP."""
    others = [AllocatorSettings.parse(text) for text in setting or ()]
    about = trained(model, inputs, sample, optimizer, dtype, device)
    check_writable(html, force=force, option="--html")
    with interruptible():
        content = unpacked(sys.stdin.buffer.read()) if str(file) == "-" else read_file(file)
        if is_history(content):
            name = "stdin" if str(file) == "-" else file.name.removesuffix(".gz")
            history = _chosen(read_histories(content, name), gpu)
            _show_history(history, others, about, html=html, as_json=as_json, top=top)
            return
        if html is not None or others or gpu is not None:
            raise InvalidInput("--html, --gpu and --setting are for snapshots; this is the text of a message")
        _show_message(content.decode("utf-8", errors="replace"), about, as_json=as_json)


def _show_history(
    history: MemoryHistory,
    others: list[AllocatorSettings],
    about: Trained | None,
    *,
    html: Path | None,
    as_json: bool,
    top: int,
) -> None:
    diagnosis = diagnose(history, (*others, *(each for each in USUAL_SETTINGS if each not in others)))
    if about is not None:
        capacity_bytes = min((each.capacity_bytes for each in diagnosis.refusals), default=None)
        diagnosis = dataclasses.replace(diagnosis, advice=(about.advice(capacity_bytes),))
    if html is not None:
        write_file(html, doctor_page.render(diagnosis), noun="page", option="--html")
    if as_json:
        typer.echo(json.dumps(diagnosis_data(diagnosis, top=top), indent=2))
    else:
        print_diagnosis(Console(), diagnosis, top=top)


def _show_message(text: str, about: Trained | None, *, as_json: bool) -> None:
    message = read_message(text)
    advice = [] if about is None else [about.advice(message.capacity_bytes)]
    if as_json:
        typer.echo(json.dumps(message_data(message) | {"advice": advice}, indent=2))
        return
    print_message(Console(), message)
    for words in advice:
        Console().print(words, markup=False, highlight=False)


def _chosen(histories: list[MemoryHistory], gpu: int | None) -> MemoryHistory:
    """Take the GPU that was asked for, or the one with most memory; say which others there are."""
    if gpu is None:
        chosen = max(histories, key=lambda each: (each.reserved_at_end_bytes, len(each.events)))
        if len(histories) > 1:
            others = ", ".join(str(each.device) for each in histories if each is not chosen)
            typer.echo(f"showing GPU {chosen.device}; --gpu shows {others}", err=True)
        return chosen
    for history in histories:
        if history.device == gpu:
            return history
    known = ", ".join(str(each.device) for each in histories)
    raise InvalidInput(f"the snapshot has nothing of GPU {gpu}; it has {known}")
