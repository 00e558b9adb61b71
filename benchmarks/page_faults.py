"""Whether an arena would pay: what page faults cost a step, and what is left of them when malloc keeps big blocks.

    python -m benchmarks.page_faults            # ResNet-50, MobileNetV2 and GPT-2
    python -m benchmarks.page_faults resnet     # models whose name contains one of the words

An arena that holds a plan's values at fixed places has no page faults after its first step. glibc told to keep big
blocks has few. So the difference between glibc as it comes and glibc so told is about what an arena could win, and the
faults that remain are what it could win beyond. Eager and planned steps (half of the activation part), each in a
process of its own, in turns.
"""

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import memfit
from benchmarks.arguments import words_and_results
from benchmarks.malloc import MALLOC_SETTINGS
from benchmarks.measuring import Subject, peak_bytes, persistent_bytes
from benchmarks.models import frontier_cases
from memfit.cli.torchvision_repair import prepare
from memfit.files import write_atomically
from memfit.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "page_faults.json"
CASES = ("ResNet-50 x16", "MobileNetV2 x16", "GPT-2 x4")
ROUNDS = 3
SECONDS = 8.0  # of steps in a process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    case: str
    planned: bool
    settled: bool  # glibc keeps big blocks
    step_s: float
    faults: float  # of a step
    allocated_bytes: int  # at the peak


def main() -> None:
    options = _options()
    if options.one:
        print(json.dumps(dataclasses.asdict(_measured(options.one, planned=options.planned, settled=options.settled))))
        return
    console, rows = Console(width=None if sys.stdout.isatty() else 140), []
    names = [name for name in CASES if not options.words or any(word.lower() in name.lower() for word in options.words)]
    for name in names:
        for planned in (False, True):
            found: dict[bool, list[Row]] = {False: [], True: []}
            for number in range(2 * ROUNDS):
                settled = bool(number % 2)
                found[settled].append(_in_process(name, planned=planned, settled=settled))
            rows += [_middle(each) for each in found.values()]
            console.print(_line(rows[-2], rows[-1]), highlight=False)
            write_atomically(options.results, json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    console.print(_table(rows))


def _in_process(name: str, *, planned: bool, settled: bool) -> Row:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.page_faults", "--one", name]
    command += ["--planned"] * planned + ["--settled"] * settled
    plain = {key: value for key, value in os.environ.items() if key not in MALLOC_SETTINGS}
    outcome = subprocess.run(
        command, env=plain | (MALLOC_SETTINGS if settled else {}), capture_output=True, text=True, check=False
    )
    if outcome.returncode:
        raise RuntimeError(f"{name} ended with code {outcome.returncode}: {outcome.stderr[-2000:]}")
    return Row(**json.loads(outcome.stdout.splitlines()[-1]))


def _measured(name: str, *, planned: bool, settled: bool) -> Row:
    prepare()
    case = next(case for case in frontier_cases() if str(case) == name)
    subject = Subject.of(case)
    model = subject.model
    allocated_bytes = peak_bytes(subject, model)
    if planned:
        least_bytes = persistent_bytes(subject)
        budget = (allocated_bytes + least_bytes) // 2
        options: dict[str, Any] = {} if case.outputs is None else {"outputs": case.outputs}
        memfit.fit(model, case.sample(subject.batch), budget, time_limit=4.0, **options)
        allocated_bytes = peak_bytes(subject, model)
    for _ in range(2):
        subject.step(model)
    times: list[float] = []
    faults: list[int] = []
    end = time.perf_counter() + SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        subject.step(model)
        times.append(time.perf_counter() - start)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before.ru_minflt)
    return Row(
        case=name,
        planned=planned,
        settled=settled,
        step_s=statistics.median(times),
        faults=statistics.median(faults),
        allocated_bytes=allocated_bytes,
    )


def _middle(rows: list[Row]) -> Row:
    return sorted(rows, key=lambda row: row.step_s)[len(rows) // 2]


def _line(plain: Row, settled: Row) -> str:
    kind = "planned" if plain.planned else "eager"
    return (
        f"{plain.case}, {kind}: {plain.faults:.0f} -> {settled.faults:.0f} faults a step, "
        f"{plain.step_s:.3f} -> {settled.step_s:.3f} s"
    )


def _table(rows: list[Row]) -> Table:
    table = Table(title="Steps with glibc as it comes, and told to keep big blocks")
    for heading in ("case", "step", "malloc", "seconds", "page faults", "allocated at the peak"):
        table.add_column(heading, justify="left" if heading in ("case", "step", "malloc") else "right")
    for row in rows:
        table.add_row(
            row.case,
            "planned" if row.planned else "eager",
            "keeps big blocks" if row.settled else "as it comes",
            f"{row.step_s:.3f}",
            f"{row.faults:.0f}",
            format_bytes(row.allocated_bytes),
        )
    return table


def _options() -> argparse.Namespace:
    parser = words_and_results(__doc__, RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--planned", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--settled", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
