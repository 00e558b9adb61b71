"""Estimates for GPUs held against peaks that others have measured on real ones.

    python -m benchmarks.gpu_truth                  # all rows that can be built here
    python -m benchmarks.gpu_truth resnet course    # those whose name contains one of the words

The records are not part of the repository: they are looked for beside it, or in the folder that MEMFIT_GPU_TRUTH names.
Nothing runs on a GPU here, and models have no weights: every figure is an estimate beside a record. The result is
written to benchmarks/results/gpu_truth.json.
"""

import argparse
import csv
import dataclasses
import json
import os
import re
import statistics
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import memfit
from benchmarks.gpu_truth_cases import Case, cases
from memfit.files import write_atomically

RESULTS = Path(__file__).parent / "results" / "gpu_truth.json"
_MIB = 2**20
_UNITS = {"GiB": 2**30, "MiB": _MIB, "GB": 10**9, "MB": 10**6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of a record beside its estimate."""

    name: str
    grade: str
    metric: str  # "allocated", "reserved", or "process": reserved and a context
    device: str
    measured_bytes: int
    low_bytes: int  # of the estimate
    high_bytes: int

    @property
    def error(self) -> float:
        """Distance to the lower end: what is known of the step without guesses."""
        return self.low_bytes / self.measured_bytes - 1

    @property
    def is_inside(self) -> bool:
        return self.low_bytes <= self.measured_bytes <= self.high_bytes

    @property
    def width(self) -> float:
        return (self.high_bytes - self.low_bytes) / self.measured_bytes


def main() -> None:
    words = _words()
    console = Console()
    rows = _records()
    found: list[Comparison] = []
    for case in cases():
        if not words or any(word.lower() in case.name.lower() for word in words):
            with console.status(case.name):
                found += _compared(case, rows[case.row])
    console.print(_table(found))
    console.print(_verdict(found))
    if not words:
        write_atomically(RESULTS, json.dumps([_as_data(each) for each in found], indent=1))


def _words() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of cases")
    return parser.parse_args().words  # type: ignore[no-any-return]


def _records() -> list[dict[str, str]]:
    beside = Path(__file__).parents[2] / "shared" / "gpu-truth"
    path = Path(os.environ.get("MEMFIT_GPU_TRUTH") or beside) / "measured.csv"
    if not path.exists():
        raise SystemExit(f"there are no records of GPUs at {path}: put them there, or name them in MEMFIT_GPU_TRUTH")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _compared(case: Case, record: dict[str, str]) -> list[Comparison]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that are built without weights
        with memfit.without_weights():
            model, batch = case.make()
        estimate = memfit.estimate(
            model,
            batch,
            loss=case.loss,
            optimizer=case.optimizer,
            device=case.device,
            loop=memfit.Loop(gradients=case.gradients),
            progress=False,
        )
    ends = _ends(estimate, case)
    return [
        Comparison(
            name=case.name,
            grade=record["grade"],
            metric=metric,
            device=case.device,
            measured_bytes=size_bytes,
            low_bytes=ends[metric][0],
            high_bytes=ends[metric][1],
        )
        for metric, size_bytes in _measured(case, record).items()
    ]


def _ends(estimate: memfit.Estimate, case: Case) -> dict[str, tuple[int, int]]:
    """Return the ends of an estimate by metric."""
    low = estimate.reserved
    assert low is not None
    high = low if estimate.highest is None else estimate.highest.reserved
    context = case.context_mib
    reserved = (low.reserved_bytes, max(low.reserved_bytes, high.reserved_bytes))
    return {
        "allocated": (low.allocated_bytes, max(low.allocated_bytes, high.allocated_bytes)),
        "reserved": reserved,
        "process": (reserved[0] + int(context[0] * _MIB), reserved[1] + int(context[1] * _MIB)),
    }


def _measured(case: Case, record: dict[str, str]) -> dict[str, int]:
    """Return what a record says, by metric, without what others hold in the same process."""
    texts = record["peak_bytes_or_text"].split(" / ")
    sizes = [_bytes(text) - int(case.before_mib * _MIB) for text in texts]
    if "NVML" in record["metric"]:
        return {"process": sizes[0]}
    return dict(zip(("allocated", "reserved"), sizes, strict=False))


def _bytes(text: str) -> int:
    number, unit = re.match(r"~?([\d.]+) ?([A-Za-z]*)", text).groups()  # type: ignore[union-attr]
    return int(float(number) * _UNITS.get(unit, 1))


def _table(found: list[Comparison]) -> Table:
    table = Table(title="Estimated for a GPU, and measured on one", title_justify="left")
    for title in ("step", "grade", "metric", "measured, MiB", "estimated, MiB", "error", "inside"):
        table.add_column(title, justify="left" if title in ("step", "metric") else "right")
    for each in found:
        ends = [f"{size / _MIB:,.0f}" for size in (each.low_bytes, each.high_bytes)]
        shown = ends[0] if ends[0] == ends[1] else " to ".join(ends)
        inside = "" if ends[0] == ends[1] else "yes" if each.is_inside else "no"
        measured = f"{each.measured_bytes / _MIB:,.0f}"
        table.add_row(each.name, each.grade, each.metric, measured, shown, f"{each.error:+.1%}", inside)
    return table


def _verdict(found: list[Comparison]) -> str:
    lines = []
    for metric in ("allocated", "reserved", "process"):
        of_metric = [each for each in found if each.metric == metric]
        errors = [abs(each.error) for each in of_metric]
        if errors:
            inside = sum(each.is_inside or abs(each.error) <= 0.01 for each in of_metric)
            lines.append(
                f"{metric}: {len(errors)} figures, median error of the lower end {statistics.median(errors):.1%}, "
                f"{sum(error <= 0.05 for error in errors)} within 5%, {inside} in their range or within 1%"
            )
    return "\n".join(lines)


def _as_data(each: Comparison) -> dict[str, Any]:
    return dataclasses.asdict(each) | {"error": each.error, "is_inside": each.is_inside, "width": each.width}


if __name__ == "__main__":
    main()
