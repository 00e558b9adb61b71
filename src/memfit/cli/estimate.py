"""`memfit estimate`: the peak of a training step, and what it is made of."""

import json
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from memfit import api
from memfit.cli import options
from memfit.cli.progress import Display, display
from memfit.cli.streams import check_writable, interruptible, only_results_on_stdout, write_file
from memfit.cli.subject import Subject
from memfit.distributed.buckets import BucketPolicy
from memfit.distributed.simulated import check_world
from memfit.distributed.simulated import estimate as estimate_rank
from memfit.errors import InvalidInput
from memfit.estimate import Estimate
from memfit.report import page
from memfit.report.breakdown import automatic_depth
from memfit.report.limit import Limit
from memfit.report.tables import print_estimate

DOES_NOT_FIT = 1

HELP = """Predict the peak memory of one training step, and show what it is made of.

The model is built without memory for its weights and is not run, so it may be bigger than this machine.

\b
Exit codes:
  0  the step fits the device, or no device was asked about
  1  the step does not fit the device
  2  the model, the sample or an option cannot be used
"""

EXAMPLES = """\b
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
\b
  memfit estimate --model "transformers:LlamaForCausalLM()" \\
      --dtype bfloat16 --world-size 8 --shard fsdp --device A100-40GB \\
      --input input_ids=1x2048:int64 --input labels=1x2048:int64
"""


def estimate(
    model: options.Model,
    inputs: options.Inputs = None,
    sample: options.SampleName = None,
    optimizer: options.OptimizerName = "none",
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME|BYTES", help="What the step has to fit: a device (A100-40GB) or bytes (24GiB)."),
    ] = None,
    dtype: options.DType = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Run each distinct operator once, to count what it allocates inside.",
            show_default="where the step could run here",
        ),
    ] = None,
    process: Annotated[
        bool, typer.Option("--process", help="Tell the peak of the process too; takes half a minute the first time.")
    ] = False,
    world_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="How many ranks train together; --input is one rank's share of a batch."),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(metavar="ddp|zero1|fsdp", help="What is divided over the ranks, with --world-size."),
    ] = "ddp",
    bucket_views: Annotated[
        bool, typer.Option("--bucket-views", help="DDP with gradient_as_bucket_view: gradients are held once.")
    ] = False,
    as_json: options.AsJson = False,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", dir_okay=False, help="Write a report page to this file.")
    ] = None,
    force: options.Force = False,
    top: options.Top = 10,
    depth: options.Depth = None,
) -> None:
    """See HELP."""
    if world_size is None and (shard != "ddp" or bucket_views):
        raise InvalidInput("--shard and --bucket-views say how ranks divide a model; give --world-size too")
    limit = None if device is None else Limit.of(device)
    subject = Subject.of(model, inputs, sample, dtype)
    check_writable(html, force=force, option="--html")
    with interruptible():
        with only_results_on_stdout(), display() as shown:
            ranks = None if world_size is None else Ranks(world_size, shard, bucket_views)
            result = _estimated(subject, options.optimizer_of(optimizer), limit, measure, shown, ranks, process=process)
        if html is not None:
            write_file(html, page.render(result, limit, top=top, depth=depth), noun="report", option="--html")
        if as_json:
            typer.echo(_json(result, limit, depth=depth or automatic_depth(result), top=top))
        else:
            print_estimate(Console(), result, limit, top=top, depth=depth)
    if limit is not None and not limit.fits(result.needed_bytes):
        raise typer.Exit(DOES_NOT_FIT)


class Ranks(NamedTuple):
    """Those of which one is estimated."""

    world_size: int
    shard: str
    bucket_views: bool


def _estimated(
    subject: Subject,
    optimizer: str | None,
    limit: Limit | None,
    measure: bool | None,
    shown: Display,
    ranks: Ranks | None,
    *,
    process: bool,
) -> Estimate:
    if ranks is not None:
        check_world(ranks.world_size, ranks.shard)
    shown.doing("building the model")
    model, sample = subject.without_weights()
    shown.doing("tracing a training step")
    device = limit.label if limit is not None and limit.is_device else None
    if ranks is None:
        return api.estimate(
            model,
            sample,
            optimizer=optimizer,
            device=device,
            measure=measure,
            process=process,
            progress=shown.measured,
        )
    return estimate_rank(
        model,
        sample,
        optimizer=optimizer,
        device=device,
        measure=measure,
        progress=shown.measured,
        world_size=ranks.world_size,
        shard=ranks.shard,
        buckets=BucketPolicy(views=ranks.bucket_views),
    )


def _json(result: Estimate, limit: Limit | None, *, depth: int, top: int) -> str:
    verdict = {
        "fits": None if limit is None else limit.fits(result.needed_bytes),
        "surely_fits": None if limit is None else limit.fits(result.most_needed_bytes),
        "device_usable_bytes": None if limit is None else limit.usable_bytes,
    }
    return json.dumps(result.to_dict(depth=depth, top=top) | verdict, indent=2)
