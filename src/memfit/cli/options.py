"""Options that several commands have, each with one meaning and one help text."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated

import typer

from memfit.measure.devices import DEVICES
from memfit.measure.optimizer import known_optimizers
from memfit.recipe import TECHNIQUES

EXIT_CODES = """\b
Exit codes:
  0  {fine}
  2  the model, the sample, the plan or an option cannot be used
  3  no plan fits the budget; the smallest that was found is said
"""


def completing(names: Iterable[str]) -> Callable[[str], list[str]]:
    """What a shell offers for an option, in any case.

    >>> completing(["T4", "L4", "L40S"])("l")
    ['L4', 'L40S']
    """
    known = list(names)
    return lambda incomplete: [name for name in known if name.lower().startswith(incomplete.lower())]


def _complete_techniques(incomplete: str) -> list[str]:
    """The last of several names, separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in TECHNIQUES if name.startswith(last)]


class FloatType(StrEnum):
    """What parameters can be made of."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="A class or function that makes the model, by name, with literal arguments: "
        '"package.module:callable(1, flag=True)", torchvision.models.resnet50 or ./file.py:callable.',
    ),
]
MaybeModel = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="What was trained, named as for memfit estimate.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE",
        help="One argument of the model's forward, as [name=]shape[:dtype]; give it once for each argument: "
        "16x3x224x224, ids=1x2048:int64.",
    ),
]
SampleName = Annotated[
    str | None,
    typer.Option(
        "--sample", metavar="NAME", help="A function without arguments that makes the sample: ./file.py:make_batch."
    ),
]
DType = Annotated[FloatType | None, typer.Option("--dtype", help="What parameters and inputs are made of.")]
OptimizerName = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help='A name in torch.optim, whose state and step are counted; "none": forward and backward only.',
        autocompletion=completing((*known_optimizers(), "none")),
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Where random weights and inputs start. Whole numbers in --input are drawn from 0 and 1.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="BYTES|SHARE",
        help="The peak of one training step: 6GiB, a share of the unplanned peak (0.5), or smallest.",
    ),
]
Allow = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Techniques, by commas: recompute, lean, chunk, offload, inductor, channels-last, 16-bit, 8-bit, 4-bit.",
        show_default="recompute,lean: those that change no bit",
        autocompletion=_complete_techniques,
    ),
]
Recompute = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Modules whose values are computed again: a name pattern (encoder.layer.*), a type (nn.ReLU) "
        "or a number of blocks. May be given several times.",
    ),
]
Keep = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Modules whose values are kept, named the same way.")
]
Outputs = Annotated[
    str, typer.Option(metavar="all|loss", help="Which outputs of the model the step keeps: all, or its loss alone.")
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Plan for a device that is not here (A100-40GB), by estimated times.",
        autocompletion=completing(each.name for each in DEVICES),
    ),
]
TimeLimit = Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="How long to look for better plans.")]
Measure = Annotated[
    bool | None,
    typer.Option(
        "--measure/--no-measure",
        help="Build the model with its weights and time its operators; otherwise times are estimated.",
        show_default="where it fits here",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Write over files that exist.")]
Top = Annotated[int, typer.Option(metavar="N", min=1, help="How many modules and values to show.")]
Depth = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="How many names deep to look into modules.", show_default="where it tells something"
    ),
]


def optimizer_of(name: str) -> str | None:
    """The optimizer an option names; "none" is none."""
    return None if name.lower() == "none" else name
