"""The race as a table for docs/kernels.md: what was measured, as it was measured."""

from collections.abc import Iterable

from benchmarks.frontier_record import COMPILED, INDUCTOR, SAME_GRAPHS, CaseRecord, EagerRun, PeerPoint

_SETTINGS = ("1.00 of the part", "0.50 of the part", "0.33 of the part")
_SMALLEST = "smallest"
_HEAD = (
    "| case | at 1.00 | at 0.50 | at 0.33 | smallest | torch.compile at its budgets | memfit there | "
    "first step, s: memfit, torch.compile |"
)


def race_markdown(records: Iterable[CaseRecord]) -> str:
    """Ratios to eager with standard errors; peaks as the part of the activations that is left."""
    return "\n".join([_HEAD, "|---" * 8 + "|", *map(_row, records)])


def _row(record: CaseRecord) -> str:
    assert record.eager is not None
    own = {point.setting: point for point in record.peers if point.peer == COMPILED}
    others = [point for point in record.peers if point.peer == INDUCTOR and SAME_GRAPHS not in point.reason]
    cells = [_ratio(own.get(setting)) for setting in _SETTINGS]
    smallest = own.get(_SMALLEST)
    cells.append("" if smallest is None else f"{_part(record.eager, smallest)}: {_ratio(smallest)}")
    there = [point for setting, point in own.items() if setting not in (*_SETTINGS, _SMALLEST)]
    for points in (others, there):
        cells.append("; ".join(f"{_part(record.eager, each)}: {_plain_ratio(each)}" for each in points))
    return f"| {record.case} | {' | '.join(cells)} | {_first(own.values())}, {_first(others)} |"


def _ratio(point: PeerPoint | None) -> str:
    if point is None:
        return ""
    if point.time_ratio is None:
        return "no plan" if "Infeasible" in point.reason else "failed"
    return f"{point.time_ratio:.2f} ± {point.error or 0.0:.2f}{', eager kernels' if point.eager_kernels else ''}"


def _plain_ratio(point: PeerPoint) -> str:
    return "failed" if point.time_ratio is None else f"{point.time_ratio:.2f}"


def _part(eager: EagerRun, point: PeerPoint) -> str:
    return "none" if point.peak_bytes is None else f"{eager.fraction(point.peak_bytes):.2f}"


def _first(points: Iterable[PeerPoint]) -> str:
    """Seconds of the first setting."""
    return next((f"{point.first_step_s:.0f}" for point in points if point.first_step_s is not None), "none")
