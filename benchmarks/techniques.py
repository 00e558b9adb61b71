"""Memory and time of the techniques of a training step, alone and one on top of the other.

    python -m benchmarks.techniques                  # GPT-2 and ResNet-50
    python -m benchmarks.techniques gpt              # cases whose name contains one of the words
    python -m benchmarks.techniques --results FILE   # also write the figures as JSON

Peaks are of the second step, with parameters, optimizer state and batch. Times are medians of pairs of steps, plain and
with the technique, in both orders. Every row runs in a process of its own with glibc told to keep big blocks.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import memfit
from benchmarks.models import Case, standard_cases
from memfit.cli.torchvision_repair import prepare
from memfit.files import write_atomically
from memfit.measure.peak import held_bytes, measure_peak
from memfit.units import format_bytes

_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
_CASES = ("GPT-2 x2", "ResNet-50 x8")
_PAIRS = 5

ALONE: dict[str, dict[str, Any]] = {
    "micro-batches (2)": {"micro_batches": 2},
    "bf16 autocast": {"precision": "bf16"},
    "pure bf16, stochastic rounding": {"precision": "pure-bf16"},
    "update inside backward": {"update": "inside"},
    "optimizer state on disk": {"state_tier": "disk"},
    "planned (smallest budget)": {"budget": "smallest"},
    "planned + update inside backward": {"budget": "smallest", "update": "inside"},
}
CUMULATIVE: dict[str, dict[str, Any]] = {
    "1. planned (smallest budget)": {"budget": "smallest"},
    "2. + update inside backward": {"budget": "smallest", "update": "inside"},
    "3. + optimizer state on disk": {"budget": "smallest", "update": "inside", "state_tier": "disk"},
    "4. + pure bf16": {"budget": "smallest", "update": "inside", "state_tier": "disk", "precision": "pure-bf16"},
}
ROWS = {**ALONE, **CUMULATIVE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    case: str
    technique: str
    plain_peak_bytes: int
    peak_bytes: int
    gradient_bytes: int
    state_bytes: int  # of the optimizer, wherever it is
    plain_s: float
    time_ratio: float


def main() -> None:
    options = _options()
    if options.one is not None:
        case, technique = options.one
        print(json.dumps(dataclasses.asdict(run_row(_case(case), technique))))
        return
    console, rows = Console(), []
    for case in _CASES:
        if options.words and not any(word.lower() in case.lower() for word in options.words):
            continue
        for technique in ROWS:
            with console.status(f"{case}, {technique}"):
                rows.append(_in_own_process(case, technique))
            console.print(_line(rows[-1]))
            if options.results is not None:
                write_atomically(options.results, json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    for case in dict.fromkeys(row.case for row in rows):
        console.print(_table(case, [row for row in rows if row.case == case]))


def run_row(case: Case, technique: str) -> Row:
    """Measure one technique beside the plain step."""
    prepare()
    options = dict(ROWS[technique])
    budget = options.pop("budget", None)
    with tempfile.TemporaryDirectory(dir=os.environ.get("MEMFIT_DISK")) as directory:
        if "state_tier" in options:
            options["directory"] = directory
        plain, batch = _step(case, None, {}), case.make_batch(case.batch_size)
        step = _step(case, budget, options)
        plain_peak, peak = _peak(plain, batch), _peak(step, batch)
        plain_s, ratio = _times(plain, step, batch)
        return Row(
            case=str(case),
            technique=technique,
            plain_peak_bytes=plain_peak,
            peak_bytes=peak,
            gradient_bytes=held_bytes([list(step.model.parameters())]),
            state_bytes=held_bytes([step.optimizer]),
            plain_s=plain_s,
            time_ratio=ratio,
        )


def _step(case: Case, budget: str | None, options: dict[str, Any]) -> memfit.Step:
    torch.manual_seed(0)
    model = case.make_model().train()
    if options.get("precision") == "pure-bf16":
        model.to(torch.bfloat16)
    if budget is not None:
        sample = case.sample(case.make_batch(case.batch_size))
        if options.get("precision") == "pure-bf16":
            sample = torch.utils._pytree.tree_map(_bfloat16, sample)
        memfit.fit(model, sample, budget=budget, outputs=case.outputs or "all")
    return memfit.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), case.loss, **_allowed(options))


def _allowed(options: dict[str, Any]) -> dict[str, Any]:
    return options | ({"allow": ("batch-statistics",)} if "micro_batches" in options else {})


def _bfloat16(leaf: Any) -> Any:
    return leaf.to(torch.bfloat16) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _peak(step: memfit.Step, batch: Any) -> int:
    """Of the second step. State on disk is not in memory, so it is not resident."""
    step(batch)
    optimizer = [] if step.policy.state_tier == "disk" else [step.optimizer]
    return measure_peak(lambda: step(batch), resident=[step.model, batch, *optimizer]).peak_bytes


def _times(plain: memfit.Step, step: memfit.Step, batch: Any) -> tuple[float, float]:
    seconds: list[float] = []
    ratios: list[float] = []
    for number in range(_PAIRS):
        order = (plain, step) if number % 2 else (step, plain)
        taken = {id(each): _seconds(each, batch) for each in order}
        seconds.append(taken[id(plain)])
        ratios.append(taken[id(step)] / taken[id(plain)])
    return statistics.median(seconds), statistics.median(ratios)


def _seconds(step: memfit.Step, batch: Any) -> float:
    start = time.perf_counter()
    step(batch)
    return time.perf_counter() - start


def _in_own_process(case: str, technique: str) -> Row:
    command = [sys.executable, "-m", "benchmarks.techniques", "--one", case, technique]
    done = subprocess.run(command, env={**os.environ, **_MALLOC}, check=True, stdout=subprocess.PIPE, text=True)
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def _case(name: str) -> Case:
    return next(case for case in standard_cases() if str(case) == name)


def _line(row: Row) -> str:
    saved = row.plain_peak_bytes - row.peak_bytes
    return (
        f"{row.case}, {row.technique}: {format_bytes(row.plain_peak_bytes)} -> {format_bytes(row.peak_bytes)} "
        f"(saved {saved / row.gradient_bytes:.0%} of the gradients' bytes), time {row.time_ratio:.2f}"
    )


def _table(case: str, rows: list[Row]) -> Table:
    plain = rows[0]
    table = Table(title=f"{case}, AdamW: plain {format_bytes(plain.plain_peak_bytes)}, {plain.plain_s:.2f} s")
    for heading in ("technique", "peak", "of plain", "time"):
        table.add_column(heading, justify="left" if heading == "technique" else "right")
    for row in rows:
        share = row.peak_bytes / row.plain_peak_bytes
        table.add_row(row.technique, format_bytes(row.peak_bytes), f"{share:.2f}", f"{row.time_ratio:.2f}")
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "TECHNIQUE"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
