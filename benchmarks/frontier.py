"""The memory/time curve of the nine models: memfit under byte budgets, side by side with its peers.

    python -m benchmarks.frontier                        # everything; goes on where it stood
    python -m benchmarks.frontier --cases resnet gpt     # those whose name contains one of the words
    python -m benchmarks.frontier --peers none           # memfit alone; or: --peers checkpoint inductor
    python -m benchmarks.frontier --quick                # fewer budgets, fewer settings a peer
    python -m benchmarks.frontier --parts memfit --fresh # measure memfit again, keep the peers' figures

Budgets are persistent + f x activation part. Persistent is what is live when the backward pass of the plain
eager run ends (parameters, buffers, gradients, batch, loss); the activation part is eager's peak minus that.

Every part of a case (eager, memfit, one a peer) runs in a process of its own, with glibc told to keep big blocks,
all sides alike. Every point is written to the results as it comes, so the benchmark can be interrupted.
The exit code is 1 if a part fails or a promise is not kept.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from benchmarks.frontier_case import Limits, part_points
from benchmarks.frontier_record import (
    COMPILED,
    INDUCTOR,
    PARTS,
    PEERS,
    CaseRecord,
    Point,
    load,
    point_from_dict,
    save,
)
from benchmarks.frontier_tables import line, memfit_table, misses, peer_table, summary_table
from benchmarks.further_models import further_cases
from benchmarks.malloc import MALLOC_SETTINGS
from benchmarks.models import Case, frontier_cases, small_cases
from benchmarks.plots import plot_case, plot_path
from memfit.cli.torchvision_repair import prepare

RESULTS = Path(__file__).parent / "results" / "frontier.json"
_NEAR = 0.02  # parts of the activations that one plan is made for
_MARK = "point: "  # before what a part hands over, to tell it from what compilers print


def main() -> None:
    options = _options()
    limits = Limits(
        quick=options.quick,
        plan_s=options.time_limit,
        setting_s=options.setting_limit,
        pairs_s=options.pairs_seconds,
        also=tuple(options.also),
    )
    if options.one is not None:
        prepare()
    cases = {str(case): case for case in cases_of(options)}
    if options.one is not None:
        case, part = options.one
        for point in part_points(cases[case], part, limits):
            print(_MARK + json.dumps(dataclasses.asdict(point)), flush=True)
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    benchmark = Benchmark(options=options, limits=limits, console=console, records=load(options.results))
    wanted = [case for case in cases.values() if _is_wanted(case, options.cases)]
    for case in wanted:
        benchmark.measure(case)
        benchmark.show(str(case))
    records = [benchmark.records[str(case)] for case in wanted]
    console.print(summary_table(records))
    missed = [*benchmark.failed, *misses(records)]
    for miss in missed:
        console.print(f"[red]missed:[/red] {miss}", highlight=False)
    sys.exit(1 if missed else 0)


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return the nine models, or twenty further ones, or some small ones to try out the benchmark itself."""
    if options.small:
        return small_cases()
    return further_cases() if options.further else frontier_cases()


@dataclasses.dataclass(kw_only=True)
class Benchmark:
    """The run of the whole benchmark: what was asked for, and what is known so far."""

    options: argparse.Namespace
    limits: Limits
    console: Console
    records: dict[str, CaseRecord]
    failed: list[str] = dataclasses.field(default_factory=list)

    def measure(self, case: Case) -> None:
        """Measure the parts of a case that are not known yet."""
        name = str(case)
        self.records.setdefault(name, CaseRecord(case=name))
        for part in self.options.parts:
            if self.records[name].is_finished(part, quick=self.limits.quick) and not self.options.fresh:
                self.console.print(f"{name}, {part}: known already")
                continue
            self._keep(self.records[name].without(part))
            try:
                with self.console.status(f"{name}, {part}") as status:
                    for point in self._points(name, part):
                        self._keep(self.records[name].with_point(point))
                        self.console.print(line(self.records[name], point), highlight=False)
                        status.update(f"{name}, {part}: next")
                self._keep(self.records[name].with_finished(part, quick=self.limits.quick))
            except subprocess.CalledProcessError as error:
                self.failed.append(
                    f"{name}, {part} ended with code {error.returncode}: {escape(_last_line(error.stderr))}"
                )

    def show(self, name: str) -> None:
        """Tables and picture of a case."""
        record = self.records[name]
        if record.eager is None:
            return
        self.console.print(memfit_table(record))
        if record.peers:
            self.console.print(peer_table(record))
        with contextlib.suppress(ModuleNotFoundError):  # matplotlib is an extra
            plot_case(record, plot_path(self.options.results.parent / "plots", name))

    def _keep(self, record: CaseRecord) -> None:
        self.records[record.case] = record
        save(self.options.results, self.records, _setting())

    def _points(self, name: str, part: str) -> Iterator[Point]:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.frontier", "--one", name, part]
        command += ["--time-limit", str(self.limits.plan_s), "--setting-limit", str(self.limits.setting_s)]
        command += ["--pairs-seconds", str(self.limits.pairs_s)]
        command += ["--quick"] * self.limits.quick + ["--small"] * self.options.small
        command += ["--further"] * self.options.further
        also = _fractions_of_inductor(self.records[name]) if part == COMPILED else []
        command += ["--also", *map(str, also)]
        for text in _lines(command, self.limits.part_s + len(also) * self.limits.setting_s):
            if text.startswith(_MARK):
                yield point_from_dict(part, json.loads(text.removeprefix(_MARK)))


def _fractions_of_inductor(record: CaseRecord) -> list[float]:
    """Where torch.compile's settings end, in hundredths below: compiled plans are compared with it there."""
    if record.eager is None:
        return []
    peaks = [point.peak_bytes for point in record.peers if point.peer == INDUCTOR and point.peak_bytes is not None]
    parts = sorted({math.floor(100 * record.eager.fraction(peak)) / 100 for peak in peaks})
    apart: list[float] = []
    for part in (each for each in parts if 0 < each < 1):
        if not apart or part > apart[-1] + _NEAR:  # else the lower one serves both
            apart.append(part)
    return apart[::-1]


def _lines(command: list[str], limit_s: float) -> Iterator[str]:
    """What a process prints, as it prints it. Raises CalledProcessError if it fails or is stopped."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=os.environ | MALLOC_SETTINGS, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as run,
    ):
        timer = threading.Timer(limit_s, run.kill)
        timer.start()
        try:
            yield from run.stdout or ()
            if run.wait() != 0:
                errors.seek(0)
                raise subprocess.CalledProcessError(run.returncode, command, stderr=errors.read())
        finally:
            timer.cancel()
            run.kill()


def _last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "it said nothing")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[], help="only the cases whose name contains one of these")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=[*PEERS, "none"], help="which peers")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these parts; peers are parts too")
    parser.add_argument("--quick", action="store_true", help="fewer budgets, fewer settings a peer")
    parser.add_argument("--fresh", action="store_true", help="measure again what is in the results already")
    parser.add_argument("--small", action="store_true", help="small models, to try out the benchmark itself")
    parser.add_argument("--further", action="store_true", help="twenty further models (`further_models.py`)")
    parser.add_argument("--time-limit", type=float, default=Limits.plan_s, help="seconds a plan (%(default)s)")
    parser.add_argument("--setting-limit", type=float, default=Limits.setting_s, help="seconds a peer's setting")
    parser.add_argument("--pairs-seconds", type=float, default=Limits.pairs_s, help="of steps a point (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file to go on with (%(default)s)")
    parser.add_argument("--also", nargs="*", type=float, default=[], help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "PART"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parts is None:
        options.parts = [part for part in PARTS if part not in PEERS or part in options.peers]
    return options


def _is_wanted(case: Case, words: list[str]) -> bool:
    return not words or any(word.lower() in str(case).lower() for word in words)


def _setting() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "malloc": MALLOC_SETTINGS,
    }


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on where this stood")
