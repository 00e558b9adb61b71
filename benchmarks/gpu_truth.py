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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu_truth_cases import LEFT_OUT, Case, cases
from benchmarks.gpu_truth_steps import estimated
from memfit.cli.torchvision_repair import prepare
from memfit.estimate import ALLOCATED_WITHIN, RESERVED_WITHIN, widened
from memfit.files import write_atomically

RESULTS = Path(__file__).parent / "results" / "gpu_truth.json"
_METRICS = ("allocated", "reserved", "process")
_TRACE = {"grade": "B", "source": "trace"}  # exact, of a model whose code is not public
_MARGINS = {"allocated": ALLOCATED_WITHIN, "reserved": RESERVED_WITHIN, "process": RESERVED_WITHIN}
_HELD_SHARE = 0.9  # of the figures of other sources that a margin has to hold
_MIB = 2**20
_UNITS = {"GiB": 2**30, "MiB": _MIB, "GB": 10**9, "MB": 10**6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of a record beside its estimate."""

    name: str
    source: str
    grade: str
    metric: str  # "allocated", "reserved", or "process": reserved and a context
    device: str
    measured_bytes: int
    estimated_bytes: int  # without what libraries may choose
    low_bytes: int  # of the range that is given
    high_bytes: int
    below: float  # how far under the range without margins the measured figure is
    above: float

    @property
    def error(self) -> float:
        return self.estimated_bytes / self.measured_bytes - 1

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
    left_out = {rows[row]["model"] + f" (row {row})": reason for row, reason in LEFT_OUT.items()}
    by_row = {case.row: case for case in cases()}
    prepare()
    for case in cases():
        if not words or any(word.lower() in case.name.lower() for word in words):
            with console.status(case.name):
                record = rows[case.row] if case.row >= 0 else _TRACE
                try:
                    found += _compared(case, record, by_row)
                except ImportError as error:
                    left_out[case.name] = f"{error.name or error} is not installed here"
    console.print(_table(found))
    console.print(_verdict(found))
    console.print(_cross_validation(found))
    if not words:
        data = {"figures": [_as_data(each) for each in found], "left_out": left_out}
        write_atomically(RESULTS, json.dumps(data, indent=1))


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


def _compared(case: Case, record: dict[str, str], by_row: dict[int, Case]) -> list[Comparison]:
    lowest, highest = estimated(case, by_row)
    found = []
    for metric, size_bytes in _measured(case, record).items():
        context = [int(end * _MIB) for end in case.context_mib] if metric == "process" else [0, 0]
        name = "allocated_bytes" if metric == "allocated" else "reserved_bytes"
        low_bytes, high_bytes = getattr(lowest, name), getattr(highest, name)
        ends = widened(low_bytes, high_bytes, _MARGINS[metric])
        found.append(
            Comparison(
                name=case.name,
                source=re.split(r"[/@ _]", record["source"].removeprefix("trace "))[0],
                grade=record["grade"],
                metric=metric,
                device=case.device,
                measured_bytes=size_bytes,
                estimated_bytes=low_bytes + context[0],
                low_bytes=ends[0] + context[0],
                high_bytes=ends[1] + context[1],
                below=max(0.0, 1 - (size_bytes - context[0]) / low_bytes),
                above=max(0.0, (size_bytes - context[1]) / high_bytes - 1),
            )
        )
    return found


def _measured(case: Case, record: dict[str, str]) -> dict[str, int]:
    """Return what a record says, by metric, without what others hold in the same process."""
    if any(case.peaks):
        return dict(zip(("allocated", "reserved"), case.peaks, strict=True))
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
    for title in ("step", "grade", "metric", "measured, MiB", "estimated, MiB", "error", "range, MiB", "inside"):
        table.add_column(title, justify="left" if title in ("step", "metric") else "right")
    for each in found:
        measured, estimated, low, high = (
            f"{size / _MIB:,.0f}"
            for size in (each.measured_bytes, each.estimated_bytes, each.low_bytes, each.high_bytes)
        )
        inside = "yes" if each.is_inside else "no"
        table.add_row(
            each.name, each.grade, each.metric, measured, estimated, f"{each.error:+.1%}", f"{low} to {high}", inside
        )
    return table


def _verdict(found: list[Comparison]) -> str:
    groups = {f"{metric}, all grades": [each for each in found if each.metric == metric] for metric in _METRICS}
    groups["grade A"] = [each for each in found if each.grade == "A"]
    return "\n".join(_words_of(name, group) for name, group in groups.items() if group)


def _words_of(name: str, group: list[Comparison]) -> str:
    errors = [abs(each.error) for each in group]
    return (
        f"{name}: {len(group)} figures, median error {statistics.median(errors):.1%}, "
        f"{sum(error <= 0.05 for error in errors)} within 5%, {sum(each.is_inside for each in group)} inside the range "
        f"that is given, {sum(each.width <= 0.1 for each in group)} of these ranges within 10%"
    )


def _cross_validation(found: list[Comparison]) -> str:
    """Say what margins the figures of all sources but one ask for, and how many of that one they hold."""
    lines = []
    for kind in ("allocated", "reserved"):
        group = [each for each in found if (each.metric == "allocated") == (kind == "allocated")]
        held = 0
        for source in sorted({each.source for each in group}):
            others = [each for each in group if each.source != source]
            own = [each for each in group if each.source == source]
            margins = [_quantile([getattr(each, side) for each in others]) for side in ("below", "above")]
            inside = sum(each.below <= margins[0] and each.above <= margins[1] for each in own)
            held += inside
            lines.append(
                f"{kind}: margins without {source} -{margins[0]:.1%} +{margins[1]:.1%}, hold {inside} of its {len(own)}"
            )
        lines.append(f"{kind}: {held} of {len(group)} figures are held by margins from other sources")
    return "\n".join(lines)


def _quantile(values: list[float]) -> float:
    return sorted(values)[int(_HELD_SHARE * (len(values) - 1))] if values else 0.0


def _as_data(each: Comparison) -> dict[str, Any]:
    return dataclasses.asdict(each) | {"error": each.error, "is_inside": each.is_inside, "width": each.width}


if __name__ == "__main__":
    main()
