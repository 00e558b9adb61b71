"""The race: memory against time of eager, checkpointing, torch.compile, and memfit with both kinds of kernels.

    python -m benchmarks.race                       # all nine cases; hours, goes on where it stood
    python -m benchmarks.race --cases resnet gpt    # those whose name contains one of the words
    python -m benchmarks.race --quick               # fewer settings each
    python -m benchmarks.race --further             # twenty further models, in a file of their own
    python -m benchmarks.race --markdown            # the table of docs/kernels.md from what there is

Measured as `benchmarks.frontier` does: every runner in a process of its own, with the same settings of malloc, steps
interleaved with eager ones. Then two questions are answered for each case: at every peak that torch.compile's budget
reaches, who is faster; and who gets lowest.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.frontier import Benchmark, cases_of
from benchmarks.frontier_case import Limits
from benchmarks.frontier_record import CHECKPOINT, COMPILED, EAGER, INDUCTOR, MEMFIT, CaseRecord, PeerPoint, load
from benchmarks.frontier_tables import peer_table
from benchmarks.frontier_verdict import PEAK_TOLERANCE, Check, best_peer
from benchmarks.plots import plot_case, plot_path
from benchmarks.race_markdown import race_markdown
from memfit.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "race.json"
FURTHER_RESULTS = RESULTS.with_name("race_further.json")
PARTS = (EAGER, MEMFIT, CHECKPOINT, INDUCTOR, COMPILED)  # the last also at the peaks of the one before
_NO_SLOWER = 1.02  # than torch.compile at the same peak
_LOWER = 0.75  # of the activation part that torch.compile leaves at its lowest


def main() -> None:
    options = _options()
    limits = Limits(
        quick=options.quick, plan_s=options.time_limit, setting_s=options.setting_limit, pairs_s=options.pairs_seconds
    )
    console = Console(width=None if sys.stdout.isatty() else 160)
    benchmark = Benchmark(options=options, limits=limits, console=console, records=load(options.results))
    if options.markdown:
        print(race_markdown(benchmark.records.values()))
        return
    words = [word.lower() for word in options.cases]
    wanted = [case for case in cases_of(options) if not words or any(word in str(case).lower() for word in words)]
    for case in wanted:
        benchmark.measure(case)
        _show(benchmark.records[str(case)], console, options.results.parent / "plots" / "race")
    records = [benchmark.records[str(case)] for case in wanted]
    console.print(equal_peaks_table(records))
    console.print(lowest_table(records))
    missed = [check for record in records for check in checks(record) if not check.is_kept]
    for check in missed:
        console.print(f"[red]missed:[/red] {check.where}: {check.promise}: {check.found}", highlight=False)
    sys.exit(1 if missed or benchmark.failed else 0)


def _show(record: CaseRecord, console: Console, folder: Path) -> None:
    console.print(peer_table(record))
    if record.eager is not None:
        with contextlib.suppress(ModuleNotFoundError):  # matplotlib is an extra
            plot_case(record, plot_path(folder, record.case))


def equal_peaks_table(records: Iterable[CaseRecord]) -> Table:
    """At the peak of every setting of torch.compile: its time, and the best that memfit has there."""
    table = Table(title="Time at equal peak, as ratios to eager", title_justify="left")
    for heading in ("case", "torch.compile", "its peak", "its time", "memfit, inductor", "memfit, eager kernels"):
        table.add_column(heading, justify="left" if heading in ("case", "torch.compile") else "right")
    for record in records:
        for point in _measured(record, INDUCTOR):
            assert point.peak_bytes is not None
            assert point.time_ratio is not None
            compiled = best_peer(record.peers, _about(point.peak_bytes), [COMPILED])
            eager = _best_with_eager_kernels(record, point.peak_bytes)
            table.add_row(
                record.case,
                point.setting,
                format_bytes(point.peak_bytes),
                f"{point.time_ratio:.3f}",
                "none" if compiled is None else f"{compiled.time_ratio:.3f}",
                "none" if eager is None else f"{eager:.3f}",
            )
    return table


def lowest_table(records: Iterable[CaseRecord]) -> Table:
    """The lowest peak that each reaches, as a part of eager's activation part, and what it costs there."""
    table = Table(title="Lowest peak reached: part of the activations left, time ratio to eager", title_justify="left")
    for heading in ("case", "torch.compile", "memfit, inductor", "memfit, eager kernels", "checkpoint"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for record in (each for each in records if each.eager is not None):
        compiled, planned, checkpoint = (_lowest(record, name) for name in (INDUCTOR, COMPILED, CHECKPOINT))
        table.add_row(record.case, compiled, planned, _lowest_with_eager_kernels(record), checkpoint)
    return table


def checks(record: CaseRecord) -> Iterator[Check]:
    """What is promised of compiled plans."""
    for point in _measured(record, COMPILED):
        assert point.peak_bytes is not None
        assert point.budget_bytes is not None
        ratio = point.peak_bytes / point.budget_bytes
        where = f"{record.case} at {point.setting}"
        yield _check("measured peak within the budget (1%)", where, ratio <= PEAK_TOLERANCE, f"{ratio:.3f} of it")
    for point in _measured(record, INDUCTOR):
        assert point.peak_bytes is not None
        assert point.time_ratio is not None
        best = best_peer(record.peers, _about(point.peak_bytes), [COMPILED])
        ratio = float("inf") if best is None or best.time_ratio is None else best.time_ratio / point.time_ratio
        where = f"{record.case} at the peak of torch.compile's {point.setting}"
        yield _check("no slower than torch.compile (2%)", where, ratio <= _NO_SLOWER, f"{ratio:.3f} of its time")
    lowest = [] if record.eager is None else [_lowest_part(record, name) for name in (COMPILED, INDUCTOR)]
    if lowest and all(each is not None for each in lowest):
        own, other = (each or 0.0 for each in lowest)
        yield _check(
            "a peak 25% lower (activation part)", record.case, own <= _LOWER * other, f"{own:.3f}, {other:.3f}"
        )


def _check(promise: str, where: str, is_kept: bool, found: str) -> Check:
    return Check(promise=promise, where=where, is_kept=is_kept, found=found)


def _about(peak_bytes: int) -> int:
    return int(PEAK_TOLERANCE * peak_bytes)


def _measured(record: CaseRecord, name: str) -> list[PeerPoint]:
    return [point for point in record.peers if point.peer == name and point.time_ratio is not None]


def _best_with_eager_kernels(record: CaseRecord, peak_bytes: int) -> float | None:
    fitting = [
        1 + point.measured.measured_slowdown
        for point in record.memfit
        if point.measured is not None and point.measured.measured_bytes <= _about(peak_bytes)
    ]
    return min(fitting, default=None)


def _lowest_part(record: CaseRecord, name: str) -> float | None:
    assert record.eager is not None
    return min((record.eager.fraction(point.peak_bytes or 0) for point in _measured(record, name)), default=None)


def _lowest(record: CaseRecord, name: str) -> str:
    assert record.eager is not None
    point = min(_measured(record, name), key=lambda each: each.peak_bytes or 0, default=None)
    if point is None or point.peak_bytes is None or point.time_ratio is None:
        return "none"
    return f"{record.eager.fraction(point.peak_bytes):.2f}, {point.time_ratio:.2f}"


def _lowest_with_eager_kernels(record: CaseRecord) -> str:
    assert record.eager is not None
    measured = [point.measured for point in record.memfit if point.measured is not None]
    if not measured:
        return "none"
    lowest = min(measured, key=lambda each: each.measured_bytes)
    return f"{record.eager.fraction(lowest.measured_bytes):.2f}, {1 + lowest.measured_slowdown:.2f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[], help="only the cases whose name contains one of these")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    parser.add_argument("--quick", action="store_true", help="fewer settings each")
    parser.add_argument("--fresh", action="store_true", help="measure again what is in the results already")
    parser.add_argument("--small", action="store_true", help="small models, to try out the benchmark itself")
    parser.add_argument("--further", action="store_true", help="twenty further models (`further_models.py`)")
    parser.add_argument("--markdown", action="store_true", help="measure nothing, print a table of what there is")
    parser.add_argument("--time-limit", type=float, default=6.0, help="seconds a search (%(default)s)")
    parser.add_argument("--setting-limit", type=float, default=Limits.setting_s, help="seconds a peer's setting")
    parser.add_argument("--pairs-seconds", type=float, default=Limits.pairs_s, help="of steps a point (%(default)s)")
    parser.add_argument("--results", type=Path, help=f"JSON file to go on with ({RESULTS} or {FURTHER_RESULTS})")
    options = parser.parse_args()
    if options.results is None:
        options.results = FURTHER_RESULTS if options.further else RESULTS
    return options


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on where this stood")
