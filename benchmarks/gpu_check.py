"""Hold memfit against the GPU of this machine: estimates, plans, offloading, equality.

    python -m benchmarks.gpu_check                     # the first GPU, about ten minutes
    python -m benchmarks.gpu_check resnet --device cuda:1 --results mine.json

Cases run one after the other, each in a process of its own; none is begun after the time is up, and those that were
left out are named. One JSON file and a table are written. Without a GPU it says so, and ends with code 2.
"""

import argparse
import dataclasses
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_check_case import GpuResult, run_case
from benchmarks.models import Case, frontier_cases
from memfit.accelerator import indexed, name_of_device
from memfit.files import own_version, write_atomically
from memfit.units import format_bytes

FORMAT, VERSION = "memfit.gpu-check", 1
NO_GPU = (
    "There is no GPU here (torch finds no accelerator), so nothing was checked. Run `make gpu-check` on a machine with "
    "one, and send back the file that it names."
)
_TIMES = 8  # batches are as many times as big as on two cores of a CPU
_BYTES_OFF, _OVER_BUDGET = 0.05, 0.001


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    device = chosen_device(options.device)
    if device is None:
        print(NO_GPU)
        return 2
    if options.one is not None:
        print(json.dumps(dataclasses.asdict(run_case(_cases(options.times)[options.one], device))))
        return 0
    return check(_numbered(options), device, options)


def chosen_device(name: str | None) -> torch.device | None:
    """Return the device that is asked for, or the first; None if there is none."""
    if not torch.accelerator.is_available():
        return None
    found: torch.device | None = torch.accelerator.current_accelerator()
    return indexed(name if name is not None else str(found))


def check(numbers: Sequence[int], device: torch.device, options: argparse.Namespace) -> int:
    """Run cases and write what was seen; 1 if something was missed."""
    console = Console()
    cases = _cases(options.times)
    results: list[GpuResult] = []
    failed: dict[str, str] = {}
    left_out = []
    end_s = time.monotonic() + 60 * options.minutes
    for number in numbers:
        if time.monotonic() > end_s:
            left_out.append(str(cases[number]))
            continue
        console.print(f"{cases[number]} ...")
        try:
            results.append(_in_own_process(number, device, options, end_s))
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed[str(cases[number])] = _last_line(error)
    return report(results, device, Path(options.results), failed=failed, left_out=left_out, console=console)


def report(
    results: Sequence[GpuResult],
    device: torch.device,
    path: Path,
    *,
    failed: dict[str, str],
    left_out: Sequence[str],
    console: Console,
) -> int:
    """Write the file and the tables, and say in a sentence how it went."""
    misses = [f"{case} ended: {why}" for case, why in failed.items()]
    misses += [miss for each in results for miss in misses_of(each)]
    write_atomically(path, json.dumps(_record(results, device, failed, left_out, misses), indent=1))
    console.print(estimate_table(results), plan_table(results))
    for miss in misses:
        console.print(f"[red]missed:[/red] {miss}")
    rest = f", {len(left_out)} were left out because the time was up" if left_out else ""
    verdict = "everything held" if not misses else f"{len(misses)} things were missed"
    console.print(f"{len(results)} cases were checked on {name_of_device(device)}{rest}: {verdict}. Send back {path}.")
    return 1 if misses else 0


def misses_of(result: GpuResult) -> list[str]:
    """Tell what was promised and is not so, in sentences."""
    found = []
    highest = max(result.estimated_bytes, result.estimated_highest_bytes) * (1 + _BYTES_OFF)
    if not result.estimated_bytes * (1 - _BYTES_OFF) <= result.measured_bytes <= highest:
        measured = format_bytes(result.measured_bytes)
        found.append(f"{result.case}: estimated {format_bytes(result.estimated_bytes)}, measured {measured}")
    for plan in result.plans:
        if plan.differing:
            found.append(f"{result.case}, {plan.name}: {len(plan.differing)} tensors differ ({plan.differing[0]}, ...)")
        if plan.measured_bytes > plan.budget_bytes * (1 + _OVER_BUDGET):
            over = format_bytes(plan.measured_bytes - plan.budget_bytes)
            found.append(f"{result.case}, {plan.name}: {over} over its budget")
    return found


def estimate_table(results: Sequence[GpuResult]) -> Table:
    table = Table("case", "estimated", "measured", "error", "reserved: estimated", "measured")
    for each in results:
        allocated = format_bytes(each.estimated_bytes), format_bytes(each.measured_bytes), f"{each.error:+.2%}"
        reserved = format_bytes(each.estimated_reserved_bytes), format_bytes(each.measured_reserved_bytes)
        table.add_row(each.case, *allocated, *reserved)
    return table


def plan_table(results: Sequence[GpuResult]) -> Table:
    table = Table("case", "plan", "budget", "predicted", "measured", "time predicted", "measured", "equal")
    for result in results:
        for plan in result.plans:
            if plan.refused:
                table.add_row(result.case, plan.name, *["-"] * 5, plan.refused)
                continue
            sizes = (format_bytes(each) for each in (plan.budget_bytes, plan.predicted_bytes, plan.measured_bytes))
            times = f"{plan.predicted_slowdown:+.1%}", f"{plan.slowdown:+.1%}"
            table.add_row(result.case, plan.name, *sizes, *times, "no" if plan.differing else "yes")
    return table


def _record(
    results: Sequence[GpuResult],
    device: torch.device,
    failed: dict[str, str],
    left_out: Sequence[str],
    misses: Sequence[str],
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "device": name_of_device(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "memfit": own_version(),
        "python": platform.python_version(),
        "results": [dataclasses.asdict(each) for each in results],
        "failed": failed,
        "left_out": list(left_out),
        "missed": list(misses),
    }


def _cases(times: int) -> list[Case]:
    return [dataclasses.replace(case, batch_size=case.batch_size * times) for case in frontier_cases()]


def _numbered(options: argparse.Namespace) -> list[int]:
    words = [word.lower() for word in options.words]
    named = enumerate(str(case).lower() for case in _cases(options.times))
    return [number for number, name in named if not words or any(word in name for word in words)]


def _in_own_process(number: int, device: torch.device, options: argparse.Namespace, end_s: float) -> GpuResult:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_check", "--one", str(number)]
    command += ["--device", str(device), "--times", str(options.times)]
    left_s = max(60.0, 2 * (end_s - time.monotonic()))
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=left_s)
    return GpuResult.from_dict(json.loads(run.stdout.splitlines()[-1]))


def _last_line(error: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return "it took longer than the time that was left"
    lines = str(error.stderr).strip().splitlines()
    return lines[-1] if lines else f"with code {error.returncode}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run only the cases whose name contains one of these")
    parser.add_argument("--device", help='"cuda:1"; the first GPU if it is not said')
    parser.add_argument("--minutes", type=float, default=10.0, help="no case is begun later")
    parser.add_argument("--times", type=int, default=_TIMES, help="how many times as big batches are as on a CPU")
    parser.add_argument("--results", default="gpu-check.json", help="write what was seen to this JSON file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
