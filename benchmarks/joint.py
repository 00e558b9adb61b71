"""The choice under one budget beside every single technique that fits: never slower, predicted and measured.

    python -m benchmarks.joint                 # five budgets on three models
    python -m benchmarks.joint gpt             # models whose name contains one of the words
    python -m benchmarks.joint --results FILE  # where the figures go

Budgets are fractions of what the plain step takes. Single techniques are a plan, micro-batches, an update inside
the backward pass and optimizer state on disk, each alone. The fastest of those that fit (by prediction) is run beside
the choice; where the choice is that technique, there is nothing to measure.
"""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import memfit
from benchmarks.arguments import words_and_results
from benchmarks.malloc import in_settled_malloc
from benchmarks.models import named_cases
from benchmarks.steps import Steps
from memfit.cli.torchvision_repair import prepare
from memfit.files import write_atomically
from memfit.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "joint.json"
CASES = ("GPT-2 x2", "ResNet-50 x8", "ViT-B/16 x2")
FRACTIONS = (0.9, 0.75, 0.6, 0.5, 0.4)
SINGLE: dict[str, dict[str, Any]] = {
    "plain": {"micro_batches": 1, "update": "after", "state_tier": None},
    "planned": {"micro_batches": 1, "update": "after", "state_tier": None},
    "update inside backward": {"micro_batches": 1, "update": "inside", "state_tier": None},
    "optimizer state in the disk tier": {"micro_batches": 1, "update": "after", "state_tier": "disk"},
    "2 micro-batches": {"micro_batches": 2, "update": "after", "state_tier": None},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    case: str
    fraction: float
    budget_bytes: int
    chosen: str = ""
    seconds: float = 0.0  # that choosing took
    predicted_bytes: int = 0
    measured_bytes: int = 0
    single: str = ""  # the fastest single technique that fits; empty: none does
    predicted_ratio: float | None = None  # time of the choice against that of the single technique
    measured_ratio: float | None = None
    reason: str = ""  # why nothing was chosen


def main() -> None:
    options = words_and_results(__doc__, RESULTS).parse_args()
    in_settled_malloc(sys.argv[1:], "benchmarks.joint")
    prepare()
    console, rows = Console(width=None if sys.stdout.isatty() else 160), []
    for case in named_cases(CASES, options.words):
        with tempfile.TemporaryDirectory(dir=os.environ.get("MEMFIT_DISK")) as directory:
            steps = Steps(case, Path(directory))
            for fraction in FRACTIONS:
                rows.append(row_of(steps, fraction))
                console.print(_line(rows[-1]), highlight=False)
                write_atomically(options.results, json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    console.print(_table(rows))
    slower = [row for row in rows if max(row.predicted_ratio or 0, row.measured_ratio or 0) > 1.03]
    sys.exit(1 if slower else 0)


def row_of(steps: Steps, fraction: float) -> Row:
    """Choose under a budget, and run the choice beside the fastest single technique that fits."""
    name = str(steps.case)
    try:
        choice = steps.choice(fraction)
    except memfit.InfeasibleBudget as error:
        return Row(case=name, fraction=fraction, budget_bytes=0, reason=str(error).partition(";")[0])
    words = choice.alternatives[0].techniques
    row = Row(
        case=name,
        fraction=fraction,
        budget_bytes=choice.budget_bytes,
        chosen=words,
        seconds=choice.seconds,
        predicted_bytes=choice.peak_bytes,
    )
    step = steps.chosen(choice)
    row = dataclasses.replace(row, measured_bytes=steps.peak_bytes(step))
    if words in SINGLE:
        return dataclasses.replace(row, single=words, predicted_ratio=1.0, measured_ratio=1.0)
    single = _fastest_single(steps, choice)
    if single is None:
        return row
    other_words, other_us, other = single
    _, ratio = steps.ratio(other, step)
    other.close()
    step.close()
    return dataclasses.replace(
        row, single=other_words, predicted_ratio=choice.sample_us / other_us, measured_ratio=ratio
    )


def _fastest_single(steps: Steps, choice: memfit.Choice) -> tuple[str, float, memfit.Step] | None:
    """Its name, its predicted time a sample, and a step that does it."""
    fitting = {
        each.techniques: each.sample_us
        for each in choice.alternatives
        if each.techniques in SINGLE and each.sample_us is not None and each.peak_bytes is not None
        if each.peak_bytes <= choice.budget_bytes
    }
    # Which the choice may have left out, as one that cannot win.
    planned = None if "planned" in fitting else _planned_alone(steps, choice.budget_bytes)
    if planned is not None:
        fitting[planned.alternatives[0].techniques] = planned.sample_us
    if not fitting:
        return None
    best = min(fitting, key=lambda words: fitting[words])
    fixed = SINGLE[best]
    if best == "planned":
        planned = planned or steps.choice(choice.budget_bytes, **fixed)
        return best, fitting[best], steps.chosen(planned)
    directory = {"directory": steps.directory} if fixed["state_tier"] == "disk" else {}
    return best, fitting[best], steps.by_hand(**fixed, **directory)


def _planned_alone(steps: Steps, budget_bytes: int) -> memfit.Choice | None:
    try:
        return steps.choice(budget_bytes, **SINGLE["planned"])
    except memfit.InfeasibleBudget:
        return None


def _line(row: Row) -> str:
    if row.reason:
        return f"{row.case} at {row.fraction}: {row.reason}"
    beside = "no single technique fits" if not row.single else f"{row.single} is the fastest single technique"
    ratio = "" if row.measured_ratio is None else f", {row.measured_ratio:.3f} of its time"
    return (
        f"{row.case} at {row.fraction}: {row.chosen} ({row.seconds:.0f} s to choose), "
        f"{format_bytes(row.measured_bytes)} of {format_bytes(row.budget_bytes)}; {beside}{ratio}"
    )


def _table(rows: list[Row]) -> Table:
    table = Table(title="One budget for the whole step")
    for heading in ("case", "of plain", "chosen", "s", "peak / predicted", "best single", "predicted", "measured"):
        table.add_column(heading, justify="left" if heading in ("case", "chosen", "best single") else "right")
    for row in rows:
        if row.reason:
            table.add_row(row.case, f"{row.fraction:.2f}", row.reason)
            continue
        exact = row.measured_bytes / row.predicted_bytes
        ratios = ["" if each is None else f"{each:.3f}" for each in (row.predicted_ratio, row.measured_ratio)]
        table.add_row(
            row.case,
            f"{row.fraction:.2f}",
            row.chosen,
            f"{row.seconds:.0f}",
            f"{exact:.4f}",
            row.single or "none",
            *ratios,
        )
    return table


if __name__ == "__main__":
    main()
