"""The figures of the frontier benchmark as tables in the terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from benchmarks.frontier_record import (
    AOT_EAGER,
    CHECKPOINT,
    COMPILED,
    INDUCTOR,
    CaseRecord,
    EagerRun,
    MemfitPoint,
    PeerPoint,
    Point,
)
from benchmarks.frontier_verdict import (
    LARGEST_DIFFERENCE,
    NEVER_SLOWER_THAN,
    PEAK_TOLERANCE,
    PLAN_SECONDS,
    PREDICTION_TOLERANCE,
    Check,
    allowed_slowdown,
    best_peer,
    checks,
    monet,
)
from memfit.units import format_bytes

_PEER_NAMES = {
    CHECKPOINT: "checkpoint",
    AOT_EAGER: "compile, aot_eager",
    INDUCTOR: "compile, inductor",
    COMPILED: "memfit, inductor",
}


def line(record: CaseRecord, point: Point) -> str:
    """One point, as it comes in."""
    if isinstance(point, EagerRun):
        return (
            f"{record.case}, eager: peak {format_bytes(point.peak_bytes)}, of it "
            f"{format_bytes(point.activation_bytes)} activation part; {point.step_s:.2f} s a step"
        )
    if isinstance(point, PeerPoint):
        return f"{record.case}, {_PEER_NAMES[point.peer]}, {point.setting}: {' at '.join(_peer_figures(point))}"
    if point.measured is None:
        return f"{record.case}, memfit at {point.label}: {escape(point.reason)}"
    seen = point.measured
    return (
        f"{record.case}, memfit at {point.label}: {format_bytes(seen.measured_bytes)} of "
        f"{format_bytes(seen.budget_bytes)}, {seen.measured_slowdown:+.1%} (predicted {seen.predicted_slowdown:+.1%})"
    )


def memfit_table(record: CaseRecord) -> Table:
    """A row a budget; red is what does not keep a promise."""
    eager = record.eager
    title = record.case if eager is None else f"{record.case}: {line(record, eager).partition(', eager: ')[2]}"
    reasons = [f"{point.label}: {escape(point.reason)}" for point in record.memfit if point.reason]
    table = Table(title=title, title_justify="left", caption="\n".join(reasons), caption_justify="left")
    for heading in ("f", "budget\nMiB", "predicted\nMiB", "measured\nMiB", "of\npart"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("lower\nbound", "predicted\nslowdown", "measured\nslowdown", "gap", "plan\ns"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("equal", "best peer there", "MONeT"):
        table.add_column(heading)
    for point in record.memfit:
        table.add_row(*_cells(record, point))
    return table


def _cells(record: CaseRecord, point: MemfitPoint) -> Iterator[str]:
    yield point.label
    seen = point.measured
    if seen is None:
        yield "infeasible" if point.is_infeasible else "[red]failed[/red]"
        return
    yield _mebibytes(seen.budget_bytes)
    yield _mebibytes(seen.predicted_bytes)
    yield _marked(_mebibytes(seen.measured_bytes), seen.measured_bytes <= PEAK_TOLERANCE * seen.budget_bytes)
    yield "" if record.eager is None else f"{record.eager.fraction(seen.measured_bytes):.3f}"
    yield f"{seen.lower_bound:+.1%}"
    allowed = allowed_slowdown(point.fraction, seen.lower_bound)
    yield _marked(f"{seen.predicted_slowdown:+.1%}", allowed is None or seen.predicted_slowdown <= allowed)
    off = abs(seen.measured_slowdown - seen.predicted_slowdown)
    yield _marked(f"{seen.measured_slowdown:+.1%} ±{100 * seen.measured_error:.1f}", off <= PREDICTION_TOLERANCE)
    yield f"{seen.gap:.1%}"
    yield _marked(f"{seen.plan_s:.1f}", seen.plan_s <= PLAN_SECONDS)
    is_near = seen.largest_difference <= LARGEST_DIFFERENCE
    yield _marked(f"{', '.join(seen.differing)} to {seen.largest_difference:.0e}" if seen.differing else "all", is_near)
    yield _best_peers(record, seen.measured_bytes, seen.measured_slowdown)
    published = monet(record.case, point.fraction)
    yield "" if published is None else f"{published[1]:+.1f}% at {published[0]:.2f}"


def _best_peers(record: CaseRecord, peak_bytes: int, slowdown: float) -> str:
    """The best peer that a promise speaks of, and the best with compiled kernels, which are another game."""
    found = []
    for names in (NEVER_SLOWER_THAN, (INDUCTOR,)):
        peer = best_peer(record.peers, peak_bytes, names)
        if peer is not None and peer.time_ratio is not None:
            text = f"{_PEER_NAMES[peer.peer]} {peer.time_ratio - 1:+.1%}"
            found.append(_marked(text, names == (INDUCTOR,) or slowdown <= peer.time_ratio - 1))
    return "\n".join(found) or "none fits"


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f}"


def _marked(text: str, is_kept: bool) -> str:
    return text if is_kept else f"[red]{text}[/red]"


def peer_table(record: CaseRecord) -> Table:
    table = Table(title=f"{record.case}: the peers at their measured peaks", title_justify="left")
    for heading in ("peer", "setting", "peak", "of part", "slowdown"):
        table.add_column(heading, justify="left" if heading in ("peer", "setting") else "right")
    for point in record.peers:
        part = (
            "" if record.eager is None or point.peak_bytes is None else f"{record.eager.fraction(point.peak_bytes):.3f}"
        )
        slowdown, peak = _peer_figures(point)
        table.add_row(_PEER_NAMES[point.peer], point.setting, peak, part, slowdown)
    return table


def _peer_figures(point: PeerPoint) -> tuple[str, str]:
    """Slowdown, or the reason why there is none, and peak."""
    if point.time_ratio is None or point.peak_bytes is None:
        return escape(point.reason), "no figure"
    return f"{point.time_ratio - 1:+.1%}", format_bytes(point.peak_bytes)


def summary_table(records: Sequence[CaseRecord]) -> Table:
    """Every promise: at how many points it was looked at and kept, and where it is missed most."""
    table = Table(title="Promises", title_justify="left")
    for heading in ("promise", "kept", "missed at"):
        table.add_column(heading, justify="right" if heading == "kept" else "left")
    for promise, found in _by_promise(records).items():
        missed = [check for check in found if not check.is_kept]
        kept = _marked(f"{len(found) - len(missed)} of {len(found)}", not missed)
        table.add_row(promise, kept, ", ".join(check.where for check in missed[:3]) + (", ..." if missed[3:] else ""))
    return table


def misses(records: Iterable[CaseRecord]) -> list[str]:
    return [
        escape(f"{check.where}: {promise}: {check.found}")
        for promise, found in _by_promise(records).items()
        for check in found
        if not check.is_kept
    ]


def _by_promise(records: Iterable[CaseRecord]) -> dict[str, list[Check]]:
    grouped: dict[str, list[Check]] = {}
    for record in records:
        for check in checks(record):
            grouped.setdefault(check.promise, []).append(check)
    return grouped
