"""Estimated against measured peaks, and captured against eager runs, over the standard cases.

    python -m benchmarks.accuracy                  # all cases
    python -m benchmarks.accuracy resnet gpt       # those whose name contains one of the words
    python -m benchmarks.accuracy --results FILE   # also write the figures as JSON

The exit code is 1 if a case fails or a promise is not kept. Every case runs in a process of its own,
with glibc told to keep big blocks (both sides alike), so that neither one case's leftovers nor page
faults are measured.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy_case import CaseResult, run_case
from benchmarks.malloc import MALLOC_SETTINGS
from benchmarks.models import Case, standard_cases
from memfit.files import write_atomically
from memfit.units import format_bytes


def main() -> None:
    options = _options()
    if options.one is not None:
        print(json.dumps(dataclasses.asdict(run_case(standard_cases()[options.one]))))
        return
    console = Console()
    results: list[CaseResult] = []
    failed: list[str] = []
    for number, case in enumerate(standard_cases()):
        if not _is_wanted(case, options.words):
            continue
        try:
            with console.status(f"{case}"):
                results.append(_in_own_process(number))
            console.print(_line(results[-1]))
        except subprocess.CalledProcessError as error:
            failed.append(f"{case} ended with code {error.returncode}")
    if results:
        console.print(_estimate_table(results))
        console.print(_round_trip_table(results))
        console.print(_verdict(results))
    if options.results is not None:
        write_atomically(options.results, json.dumps(_report(results), indent=1))
    failed += _misses(results)
    for miss in failed:
        console.print(f"[red]missed:[/red] {miss}")
    sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run only the cases whose name contains one of these")
    parser.add_argument("--results", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _is_wanted(case: Case, words: list[str]) -> bool:
    return not words or any(word.lower() in str(case).lower() for word in words)


def _in_own_process(number: int) -> CaseResult:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.accuracy", "--one", str(number)]
    run = subprocess.run(command, env=os.environ | MALLOC_SETTINGS, stdout=subprocess.PIPE, text=True, check=True)
    return CaseResult.from_dict(json.loads(run.stdout.splitlines()[-1]))


def _line(result: CaseResult) -> str:
    errors = ", ".join(f"{each.optimizer} {each.error:+.2%}" for each in result.estimates)
    return f"{result.case}: estimate {errors}; captured {result.time_ratio:.3f}x eager, equal: {result.is_equal}"


def _estimate_table(results: list[CaseResult]) -> Table:
    table = Table(title="Peak of a whole step, estimated before it runs and measured")
    for heading in ("case", "optimizer", "estimated", "measured", "error", "peak in"):
        table.add_column(heading, justify="left" if heading in ("case", "optimizer", "peak in") else "right")
    for result in results:
        for each in result.estimates:
            table.add_row(
                result.case,
                each.optimizer,
                format_bytes(each.estimated_bytes),
                format_bytes(each.measured_bytes),
                f"{each.error:+.3%}",
                each.peak_phase,
            )
    return table


def _round_trip_table(results: list[CaseResult]) -> Table:
    table = Table(title="Captured graphs against eager, forward and backward; equal: loss, gradients, buffers, RNG")
    for heading in ("case", "capture", "equal", "eager peak", "captured", "change", "eager step", "ratio"):
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    for result in results:
        table.add_row(
            result.case,
            f"{result.capture_s:.1f} s",
            "all" if result.is_equal else f"[red]{', '.join(result.differing)} DIFFER[/red]",
            format_bytes(result.eager_peak_bytes),
            format_bytes(result.captured_peak_bytes),
            f"{result.captured_peak_bytes / result.eager_peak_bytes - 1:+.2%}",
            f"{result.eager_step_s:.2f} s",
            f"{result.time_ratio:.3f}",
        )
    return table


def _verdict(results: list[CaseResult]) -> str:
    errors = [each.error for result in results for each in result.estimates]
    return (
        f"estimate: median error {statistics.median(map(abs, errors)):.4%}, worst {max(map(abs, errors)):.4%}, "
        f"lowest {min(errors):+.4%}; captured: {sum(result.is_equal for result in results)} of {len(results)} "
        f"equal eager bit for bit, time ratio median {statistics.median(r.time_ratio for r in results):.3f}, "
        f"worst {max(r.time_ratio for r in results):.3f}"
    )


def _misses(results: list[CaseResult]) -> list[str]:
    """Where the promises are not kept: errors of the estimate, equality, peak and time of the captured model."""
    errors = [each.error for result in results for each in result.estimates]
    misses = []
    if errors and statistics.median(map(abs, errors)) > 0.01:
        misses.append("the median error of the estimate is over 1%")
    for result in results:
        worst = max((each.error for each in result.estimates), key=abs)
        if not -0.01 <= worst <= 0.025:
            misses.append(f"{result.case}: the estimate is off by {worst:+.2%}")
        if not result.is_equal:
            misses.append(f"{result.case}: {', '.join(result.differing)} differ from eager")
        if result.captured_peak_bytes > 1.01 * result.eager_peak_bytes:
            misses.append(f"{result.case}: the captured model needs more than 1% more than eager")
        if result.time_ratio > 1.03:
            misses.append(f"{result.case}: {result.time_ratio:.3f} times eager's time")
    return misses


def _report(results: list[CaseResult]) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "malloc": MALLOC_SETTINGS,
        "cases": [dataclasses.asdict(result) for result in results],
    }


if __name__ == "__main__":
    main()
