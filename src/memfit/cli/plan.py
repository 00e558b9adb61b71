"""`memfit plan`: the fastest training step under a budget."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from memfit.cli import options
from memfit.cli.planning import built_for_planning, planned
from memfit.cli.progress import display
from memfit.cli.streams import check_writable, interruptible, only_results_on_stdout, write_file
from memfit.cli.subject import Subject
from memfit.cli.wishes import Wishes
from memfit.recipe import DEVICE
from memfit.report.plan_summary import summary_json
from memfit.report.plan_tables import print_plan

HELP = f"""Find the fastest way to run a training step under a budget.

The budget is the peak of a whole step: parameters, gradients, optimizer state, batch and activations.
Operators are timed on this machine where the model fits it; for another --device times are estimated.
Ctrl-C while a plan is searched for takes the best so far.

{options.EXIT_CODES.format(fine="a plan was found")}"""

EXAMPLES = """\b
Examples:
\b
  memfit plan --model torchvision.models.resnet50 --input 16x3x224x224 \\
      --budget 2GiB --output plan.json
\b
  memfit plan --model "transformers:GPT2LMHeadModel()" \\
      --input input_ids=4x128:int64 --input labels=4x128:int64 \\
      --outputs loss --budget 0.5 --allow recompute,lean,chunk
\b
  memfit plan --model torchvision.models.resnet50 --input 16x3x224x224 \\
      --recompute "layer*.*"
\b
  memfit plan --model torchvision.models.resnet50 --input 16x3x224x224 \\
      --budget 2GiB --allow lean    # an ablation: nothing is computed again
"""


def plan(
    model: options.Model,
    inputs: options.Inputs = None,
    sample: options.SampleName = None,
    budget: options.BudgetText = None,
    optimizer: options.OptimizerName = "none",
    allow: options.Allow = None,
    recompute: options.Recompute = None,
    keep: options.Keep = None,
    outputs: options.Outputs = "all",
    device: options.DeviceName = None,
    time_limit: options.TimeLimit = 10.0,
    dtype: options.DType = None,
    measure: options.Measure = None,
    seed: options.Seed = 0,
    output: Annotated[
        Path | None, typer.Option(metavar="PATH", dir_okay=False, help="Write the plan to this file.")
    ] = None,
    force: options.Force = False,
    as_json: options.AsJson = False,
    top: options.Top = 20,
    depth: options.Depth = None,
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
    # Without a budget it is the device's memory, which holds what the allocator reserves and not tensors alone.
    wanted = DEVICE if budget is None and wishes.device is not None else wishes.budget(budget)
    check_writable(output, force=force, option="--output")
    with interruptible():
        with only_results_on_stdout(), display(time_limit) as shown:
            made = built_for_planning(subject, wishes, measure, seed, shown)
            found = planned(*made, wanted, wishes, shown)
        if output is not None:
            write_file(output, found.to_json(), noun="plan", option="--output")
        if as_json:
            typer.echo(summary_json(found, depth=depth))
        else:
            print_plan(Console(), found, top=top, depth=depth)
