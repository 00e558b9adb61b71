"""The largest batch by prediction, held against steps that are run: it fits, a tenth more does not.

    python -m benchmarks.largest_batch                 # six models, plain AdamW steps
    python -m benchmarks.largest_batch resnet          # models whose name contains one of the words
    python -m benchmarks.largest_batch --results FILE  # where the figures go

The budget is twice the peak of a step with the standard batch, or half as much again as that for models whose
parameters are most of it.
"""

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import memfit
from benchmarks.arguments import words_and_results
from benchmarks.malloc import in_settled_malloc
from benchmarks.models import Case, named_cases
from benchmarks.steps import Steps
from memfit.cli.torchvision_repair import prepare
from memfit.files import write_atomically
from memfit.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "largest_batch.json"
TIMES: dict[str, float] = {
    "ResNet-50 x8": 2.0,
    "MobileNetV2 x8": 2.0,
    "GPT-2 x2": 1.5,
    "ViT-B/16 x2": 1.5,
    "UNet x1": 1.5,
    "LSTM x16": 2.0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    case: str
    budget_bytes: int
    size: int
    predicted_bytes: int
    measured_bytes: int
    next_size: int  # a tenth more
    next_measured_bytes: int
    captures: int
    seconds: float

    @property
    def is_kept(self) -> bool:
        return self.measured_bytes <= self.budget_bytes < self.next_measured_bytes


def main() -> None:
    options = words_and_results(__doc__, RESULTS).parse_args()
    in_settled_malloc(sys.argv[1:], "benchmarks.largest_batch")
    prepare()
    console, rows = Console(width=None if sys.stdout.isatty() else 140), []
    for case in named_cases(TIMES, options.words):
        rows.append(row_of(case, TIMES[str(case)]))
        console.print(repr(rows[-1]), highlight=False)
        write_atomically(options.results, json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    console.print(_table(rows))
    sys.exit(0 if all(row.is_kept for row in rows) else 1)


def row_of(case: Case, times: float) -> Row:
    """Ask for the largest batch, and run it and the next one up."""
    with tempfile.TemporaryDirectory() as directory:
        steps = Steps(case, Path(directory))
        step = steps.by_hand()
        budget_bytes = int(times * steps.peak_bytes(step))
        start = time.perf_counter()
        size = memfit.max_batch(step.model, steps.batch, budget_bytes, optimizer=step.optimizer, loss=case.loss)
        seconds = time.perf_counter() - start
        del step, steps
        next_size = -(-int(size) * 11 // 10)
        return Row(
            case=str(case),
            budget_bytes=budget_bytes,
            size=int(size),
            predicted_bytes=size.peak_bytes,
            measured_bytes=_measured_bytes(case, int(size), Path(directory)),
            next_size=next_size,
            next_measured_bytes=_measured_bytes(case, next_size, Path(directory)),
            captures=size.captures,
            seconds=seconds,
        )


def _measured_bytes(case: Case, size: int, directory: Path) -> int:
    steps = Steps(dataclasses.replace(case, batch_size=size), directory)
    return steps.peak_bytes(steps.by_hand())


def _table(rows: list[Row]) -> Table:
    table = Table(title="The largest batch: peaks against the budget")
    for heading in ("case", "budget", "batch", "predicted", "measured", "a tenth more", "measured ", "s"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        parts = [each / row.budget_bytes for each in (row.predicted_bytes, row.measured_bytes, row.next_measured_bytes)]
        predicted, measured, further = (f"{part:.4f}" for part in parts)
        budget, size = format_bytes(row.budget_bytes), str(row.size)
        table.add_row(row.case, budget, size, predicted, measured, str(row.next_size), further, f"{row.seconds:.0f}")
    return table


if __name__ == "__main__":
    main()
