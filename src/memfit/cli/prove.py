"""`memfit check` and `memfit profile`: what a planned step computes, and what it takes."""

from typing import Annotated

import typer
from rich.console import Console
from torch import nn

from memfit.capture.sample import Sample
from memfit.cli import options
from memfit.cli.planning import planned
from memfit.cli.progress import Display, display
from memfit.cli.stored_plans import PLAN_HELP, complete_plan_names, stored_plan
from memfit.cli.streams import interruptible, only_results_on_stdout
from memfit.cli.subject import Subject
from memfit.cli.wishes import Wishes
from memfit.errors import InvalidInput
from memfit.plan.plan import Plan
from memfit.prove import check as checking
from memfit.prove import profile as profiling
from memfit.recipe import Budget
from memfit.report.proof_tables import print_check, print_profile

NOT_AS_IT_SHOULD_BE = 4

CHECK_HELP = f"""Run an eager and a planned step from one seed and compare all they make.

Outputs, gradients, buffers and the state of the random generator are compared bit for bit, or with a
tolerance where the plan's techniques need one. The plan is read from a file, or made for a budget first.
An eager step that is over the budget keeps its saved tensors in a file in TMPDIR.

{options.EXIT_CODES.format(fine="the planned step computes what the eager one does")}\
  4  it computes something else
"""

CHECK_EXAMPLES = """\b
Examples:
\b
  memfit check --model torchvision.models.resnet18 --input 8x3x64x64 \\
      --plan plan.json
\b
  memfit check --model torchvision.models.resnet18 --input 8x3x64x64 \\
      --budget 0.6
"""

PROFILE_HELP = f"""Run planned and eager steps in turns, and measure peak and time.

The optimizer's step is not run; the bytes of its state are counted where the plan counts them.
Ctrl-C after the first pair of steps gives what was measured until then.

{options.EXIT_CODES.format(fine="the measured peak is within the budget, up to 1%")}\
  4  the measured peak is over the budget
"""

PROFILE_EXAMPLES = """\b
Examples:
\b
  memfit profile --model torchvision.models.resnet50 --input 16x3x128x128 \\
      --plan plan.json --pairs 9
\b
  memfit profile --model torchvision.models.resnet50 --input 16x3x128x128 \\
      --budget 0.5 --no-eager
\b
  memfit profile --model torchvision.models.resnet50 --input 16x3x128x128 \\
      --plan zoo:resnet50-x16-cpu-0.50 --optimizer sgd
"""

PlanName = Annotated[
    str | None,
    typer.Option("--plan", metavar="PATH|zoo:NAME", help=PLAN_HELP, autocompletion=complete_plan_names),
]


def check(
    model: options.Model,
    inputs: options.Inputs = None,
    sample: options.SampleName = None,
    plan: PlanName = None,
    budget: options.BudgetText = None,
    optimizer: options.OptimizerName = "none",
    allow: options.Allow = None,
    outputs: options.Outputs = "all",
    time_limit: options.TimeLimit = 10.0,
    dtype: options.DType = None,
    seed: options.Seed = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            help="The largest difference to accept, relative to the largest number of a tensor.",
            show_default="0, or 1e-6 for techniques that sum in another order",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """The command; what it does is said in CHECK_HELP."""
    subject = Subject.of(model, inputs, sample, dtype)
    source = _PlanSource(plan, budget, _wishes(optimizer, allow, outputs, time_limit))
    with interruptible():
        with only_results_on_stdout(), display(time_limit) as shown:
            built, example, found = source.plan_for(subject, seed, shown)
            shown.doing("running an eager and a planned step")
            outcome = checking.check(built, found, example, seed=seed, tolerance=tolerance)
        if as_json:
            typer.echo(outcome.to_json())
        else:
            print_check(Console(), outcome)
    if not outcome.passed:
        raise typer.Exit(NOT_AS_IT_SHOULD_BE)


def profile(
    model: options.Model,
    inputs: options.Inputs = None,
    sample: options.SampleName = None,
    plan: PlanName = None,
    budget: options.BudgetText = None,
    optimizer: options.OptimizerName = "none",
    allow: options.Allow = None,
    outputs: options.Outputs = "all",
    time_limit: options.TimeLimit = 10.0,
    dtype: options.DType = None,
    seed: options.Seed = 0,
    pairs: Annotated[int, typer.Option(metavar="N", min=1, help="How many planned and eager steps to time.")] = 5,
    eager: Annotated[
        bool | None,
        typer.Option("--eager/--no-eager", help="Run eager steps too; by default only where they fit the budget."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """The command; what it does is said in PROFILE_HELP."""
    subject = Subject.of(model, inputs, sample, dtype)
    source = _PlanSource(plan, budget, _wishes(optimizer, allow, outputs, time_limit))
    with interruptible():
        with only_results_on_stdout(), display(time_limit) as shown:
            built, example, found = source.plan_for(subject, seed, shown)
            shown.doing("running steps")
            outcome = profiling.profile(built, found, example, pairs=pairs, eager=eager, progress=shown.ran)
        if as_json:
            typer.echo(outcome.to_json())
        else:
            print_profile(Console(), outcome)
    if not outcome.fits:
        raise typer.Exit(NOT_AS_IT_SHOULD_BE)


def _wishes(optimizer: str, allow: str | None, outputs: str, time_limit: float) -> Wishes:
    return Wishes.of(
        optimizer=optimizer,
        allow=allow,
        recompute=None,
        keep=None,
        outputs=outputs,
        device=None,
        time_limit=time_limit,
    )


class _PlanSource:
    """Where the plan comes from: a file, read at once, or a budget to plan for."""

    def __init__(self, name: str | None, budget: str | None, wishes: Wishes) -> None:
        if name is not None and budget is not None:
            raise InvalidInput("both --plan and --budget are given; give the plan, or the budget to plan for")
        if name is None and budget is None:
            raise InvalidInput("there is no plan; give a file with --plan plan.json, or a --budget to plan for")
        self._plan = None if name is None else stored_plan(name)
        self._budget: Budget = None if budget is None else wishes.budget(budget)
        self._wishes = wishes

    def plan_for(self, subject: Subject, seed: int, shown: Display) -> tuple[nn.Module, Sample, Plan]:
        shown.doing("building the model")
        model, sample = subject.with_weights(seed)
        return model, sample, self._plan or planned(model, sample, self._budget, self._wishes, shown)
