"""Memory and time of the techniques of a training step, alone and one on top of the other.

    python -m benchmarks.techniques                  # GPT-2 and ResNet-50
    python -m benchmarks.techniques gpt              # cases whose name contains one of the words
    python -m benchmarks.techniques --rows bf16 8-bit   # rows whose name contains one of the words
    python -m benchmarks.techniques --results FILE   # where the figures go; rows that are there already are replaced

Peaks are of the second step, with parameters, optimizer state and batch; predicted ones come from a captured step,
walked by the simulator. Times are medians of pairs of steps, plain and with the technique, in both orders, with
glibc told to keep big blocks. "Planned" is the fastest plan in half of the activation part.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import memfit
from benchmarks.arguments import words_and_results
from benchmarks.malloc import in_settled_malloc
from benchmarks.models import named_cases
from benchmarks.steps import Steps, gradient_bytes
from memfit.cli.torchvision_repair import prepare
from memfit.files import write_atomically
from memfit.measure.peak import held_bytes
from memfit.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "techniques.json"
CASES = ("GPT-2 x2", "ResNet-50 x8")
PLAIN: dict[str, Any] = {"micro_batches": 1, "precision": None, "update": "after", "state_tier": None}
PLANNED, LOW_BIT = "planned", "8-bit AdamW of torchao"

# What a row does differently from the plain step; "plan" names what its plan may do.
ALONE: dict[str, dict[str, Any]] = {
    "2 micro-batches": {"micro_batches": 2},
    "bf16 autocast": {"precision": "bf16"},
    "pure bf16, stochastic rounding": {"precision": "pure-bf16"},
    "update inside backward": {"update": "inside"},
    "optimizer state on disk": {"state_tier": "disk"},
    LOW_BIT: {"optimizer": "AdamW8bit"},
    PLANNED: {"plan": ()},
    "planned, activations also on disk": {"plan": ("offload",)},
    "planned, cross-entropy in chunks": {"plan": ("chunk",)},
}
CUMULATIVE: dict[str, dict[str, Any]] = {
    "1. planned": {"plan": ()},
    "2. + update inside backward": {"plan": (), "update": "inside"},
    "3. + optimizer state on disk": {"plan": (), "update": "inside", "state_tier": "disk"},
    "4. + pure bf16": {"plan": (), "update": "inside", "state_tier": "disk", "precision": "pure-bf16"},
}
ROWS = {**ALONE, **CUMULATIVE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    case: str
    technique: str
    plain_peak_bytes: int
    peak_bytes: int
    predicted_bytes: int
    gradient_bytes: int
    state_bytes: int  # of the optimizer, wherever it is
    plain_s: float
    time_ratio: float


def main() -> None:
    options = _options()
    in_settled_malloc(sys.argv[1:], "benchmarks.techniques")
    prepare()
    console, found = Console(width=None if sys.stdout.isatty() else 140), _known(options)
    for case in named_cases(CASES, options.words):
        with tempfile.TemporaryDirectory(dir=os.environ.get("MEMFIT_DISK")) as directory:
            bench = Techniques(Steps(case, Path(directory)))
            for technique in _wanted(options.rows):
                found.pop((str(case), technique), None)
                try:
                    row = bench.row(technique)
                except memfit.MemfitError as error:  # one row that cannot be must not cost the others
                    console.print(f"{case}, {technique}: {error}", highlight=False)
                    continue
                found[row.case, technique] = row
                console.print(_line(row), highlight=False)
                write_atomically(
                    options.results, json.dumps([dataclasses.asdict(each) for each in found.values()], indent=1)
                )
    rows = [found[case, name] for case in CASES for name in ROWS if (case, name) in found]
    for case_name in dict.fromkeys(row.case for row in rows):
        console.print(_table(case_name, [row for row in rows if row.case == case_name]))
    _plot(rows, options.results.with_suffix(".png"))


def _known(options: argparse.Namespace) -> dict[tuple[str, str], Row]:
    """Rows that were measured before, where only some are wanted now."""
    if not (options.words or options.rows) or not options.results.exists():
        return {}
    return {(each["case"], each["technique"]): Row(**each) for each in json.loads(options.results.read_text())}


def _wanted(words: list[str]) -> list[str]:
    return [name for name in ROWS if not words or any(word.lower() in name.lower() for word in words)]


class Techniques:
    """The rows of one case."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._plain = steps.by_hand()
        self._plain_peak_bytes = steps.peak_bytes(self._plain)

    def row(self, technique: str) -> Row:
        """Measure one technique beside the plain step."""
        steps = self._steps
        step, predicted_bytes = self._made(ROWS[technique])
        peak_bytes = steps.peak_bytes(step)
        plain_s, ratio = steps.ratio(self._plain, step)
        row = Row(
            case=str(steps.case),
            technique=technique,
            plain_peak_bytes=self._plain_peak_bytes,
            peak_bytes=peak_bytes,
            predicted_bytes=predicted_bytes,
            gradient_bytes=gradient_bytes(step),
            state_bytes=held_bytes([step.optimizer]),
            plain_s=plain_s,
            time_ratio=ratio,
        )
        step.close()
        return row

    def _made(self, wishes: Mapping[str, Any]) -> tuple[memfit.Step, int]:
        """A step that does as a row wants, and its predicted peak."""
        steps, fixed = self._steps, {**PLAIN, **{name: wishes[name] for name in wishes if name in PLAIN}}
        permissions = ("batch-statistics",) if fixed["micro_batches"] > 1 else ()
        if "plan" in wishes:
            budget = self._half_bytes(fixed)
            choice = steps.choice(budget, allow=(*permissions, *wishes["plan"]), **fixed)
            return steps.chosen(choice), choice.peak_bytes
        if "optimizer" in wishes:
            from torchao import optim

            low_bit = getattr(optim, wishes["optimizer"])
            return steps.by_hand(optimizer=low_bit), steps.plain_bytes(low_bit)
        directory = steps.directory if fixed["state_tier"] == "disk" else None
        policy = memfit.StepPolicy(**fixed, allow=permissions, directory=directory)
        return steps.by_hand(**fixed, allow=permissions, directory=directory), steps.predicted_bytes(
            policy, permissions
        )

    def _half_bytes(self, fixed: Mapping[str, Any]) -> int:
        """What the step needs without activations, and half of them."""
        policy = memfit.StepPolicy(**fixed, directory=self._steps.directory if fixed["state_tier"] == "disk" else None)
        peak_bytes, least_bytes = self._steps.range_bytes(policy)
        return (peak_bytes + least_bytes) // 2


def _line(row: Row) -> str:
    saved = row.plain_peak_bytes - row.peak_bytes
    peaks = (
        f"{format_bytes(row.plain_peak_bytes)} -> {format_bytes(row.peak_bytes)}, predicted "
        f"{format_bytes(row.predicted_bytes)}"
    )
    return (
        f"{row.case}, {row.technique}: {peaks} "
        f"(saved {saved / row.gradient_bytes:.0%} of the gradients' bytes), time {row.time_ratio:.2f}"
    )


def _table(case: str, rows: list[Row]) -> Table:
    plain = rows[0]
    table = Table(title=f"{case}, AdamW: plain {format_bytes(plain.plain_peak_bytes)}, {plain.plain_s:.2f} s")
    for heading in ("technique", "peak", "of plain", "predicted / measured", "time"):
        table.add_column(heading, justify="left" if heading == "technique" else "right")
    for row in rows:
        share = row.peak_bytes / row.plain_peak_bytes
        exact = f"{row.predicted_bytes / row.peak_bytes:.4f}"
        table.add_row(row.technique, format_bytes(row.peak_bytes), f"{share:.2f}", exact, f"{row.time_ratio:.2f}")
    return table


def _plot(rows: list[Row], path: Path) -> None:
    """Bars of memory and time, one picture for all cases."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:  # matplotlib is an extra
        return
    cases = list(dict.fromkeys(row.case for row in rows))
    figure = Figure(figsize=(9.6, 4.2 * len(cases)), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for number, case in enumerate(cases):
        axes: Any = figure.add_subplot(len(cases), 1, number + 1)
        own = [row for row in reversed(rows) if row.case == case]
        places = torch.arange(len(own)).tolist()
        axes.barh([place + 0.2 for place in places], [row.peak_bytes / row.plain_peak_bytes for row in own], 0.38,
                  label="peak", color="#0072B2")  # fmt: skip
        axes.barh(
            [place - 0.2 for place in places], [row.time_ratio for row in own], 0.38, label="time", color="#E69F00"
        )
        axes.axvline(1.0, color="#222222", linewidth=1)
        axes.set_yticks(places, [row.technique for row in own])
        axes.set_title(f"{case}, against the plain step (1.0)", loc="left")
        axes.legend(frameon=False)
    figure.savefig(path)


def _options() -> argparse.Namespace:
    parser = words_and_results(__doc__, RESULTS)
    parser.add_argument("--rows", nargs="+", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
