"""The figures of the frontier as tables for the documentation, one a model.

python -m benchmarks.frontier_markdown                 # prints them
python -m benchmarks.frontier_markdown docs/frontier.md  # puts them between the marks of that page
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.frontier import RESULTS
from benchmarks.frontier_record import CHECKPOINT, CaseRecord, EagerRun, Measured, PeerPoint, load
from benchmarks.frontier_verdict import best_peer, monet
from memfit.files import write_atomically

BEGIN, END = "<!-- figures begin -->", "<!-- figures end -->"


def main() -> None:
    tables = "\n\n".join(markdown(record) for record in load(RESULTS).values() if record.eager and record.memfit)
    if len(sys.argv) < 2:
        print(tables)
        return
    page = Path(sys.argv[1])
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    write_atomically(page, f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")


def markdown(record: CaseRecord) -> str:
    """The table of a case: a column a budget, slowdowns in per cent of the eager step."""
    assert record.eager is not None
    points = [(point.fraction, point.measured) for point in record.memfit if point.measured is not None]
    measured = [each for _, each in points]
    heads = [_head(fraction, each, record.eager) for fraction, each in points]
    lines = [f"| {record.case} | {' | '.join(heads)} |", "|---" * (len(points) + 1) + "|"]
    rows: dict[str, Callable[[Measured], float]] = {
        "bound": lambda each: each.lower_bound,
        "predicted": lambda each: each.predicted_slowdown,
        "measured": lambda each: each.measured_slowdown,
    }
    lines += [_line(name, (f"{100 * value(each):.1f}" for each in measured)) for name, value in rows.items()]
    if any(each.measured_error for each in measured):
        lines.append(_line("its standard error", (f"{100 * each.measured_error:.1f}" for each in measured)))
    for name in dict.fromkeys([CHECKPOINT, *(peer.peer for peer in record.peers)]):
        lines.append(_line(_peer_name(name), (_peer(record, each, name) for each in measured)))
    published = [monet(record.case, fraction) for fraction, _ in points]
    if any(published):
        lines.append(_line("MONeT's paper", ("" if each is None else f"{each[1]:.1f}" for each in published)))
    lines.append(_line("plan, s", (f"{each.plan_s:.0f}" for each in measured)))
    return "\n".join(lines)


def _head(fraction: float | None, measured: Measured, eager: EagerRun) -> str:
    if fraction is not None:
        return f"{fraction:.2f}"
    return f"smallest ({eager.fraction(measured.measured_bytes):.3f})"


def _line(name: str, cells: Iterator[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _peer_name(name: str) -> str:
    return "checkpoint, best at that peak" if name == CHECKPOINT else f"{name}, best at that peak"


def _peer(record: CaseRecord, measured: Measured, name: str) -> str:
    best: PeerPoint | None = best_peer(record.peers, measured.budget_bytes, [name])
    return "none" if best is None or best.time_ratio is None else f"{100 * (best.time_ratio - 1):.1f}"


if __name__ == "__main__":
    main()
