"""One picture a case: memory against slowdown, memfit beside its peers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.frontier_record import AOT_EAGER, CHECKPOINT, COMPILED, INDUCTOR, CaseRecord, EagerRun, PeerPoint
from benchmarks.frontier_verdict import pareto

# Colours that stay apart for the colour-blind; every series has a marker of its own as well.
_PEER_STYLES = {
    CHECKPOINT: ("torch.utils.checkpoint", "#D55E00", "s"),
    AOT_EAGER: ("torch.compile budget, aot_eager", "#CC79A7", "^"),
    INDUCTOR: ("torch.compile budget, inductor", "#8A7A00", "v"),
    COMPILED: ("memfit, compiled kernels", "#009E73", "D"),
}
_BLUE, _GREY, _INK = "#0072B2", "#6E6E6E", "#222222"

Curve = tuple[list[float], list[float]]  # fractions of the activation part, slowdowns in %


def plot_path(folder: Path, case: str) -> Path:
    """Where the picture of a case is.

    >>> plot_path(Path("plots"), "ViT-B/16 x4").name
    'vit-b-16-x4.png'
    """
    name = "".join(letter if letter.isalnum() else "-" for letter in case.lower())
    return folder / f"{name}.png"


def plot_case(record: CaseRecord, path: Path) -> None:
    """Draw the points of a case; needs its eager run."""
    if record.eager is None:
        raise ValueError(f"{record.case} has no eager run to compare with; measure it first")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.6), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for peer in _PEER_STYLES:
        _draw_peer(axes, record.eager, peer, [point for point in record.peers if point.peer == peer])
    _draw_memfit(axes, record)
    axes.plot([1.0], [0.0], "*", color=_INK, markersize=12, label="plain eager", zorder=5)
    _label(axes, record.case, record.eager)
    figure.legend(loc="outside right upper", fontsize=9.5, frameon=False)  # over no point of any case
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def memfit_curves(record: CaseRecord, eager: EagerRun) -> dict[str, Curve]:
    """The three curves of memfit: what was measured, what was predicted, and what no plan can beat."""
    points = [point.measured for point in record.memfit if point.measured is not None]
    points.sort(key=lambda point: point.budget_bytes)
    return {
        "measured": (
            [eager.fraction(point.measured_bytes) for point in points],
            [100 * point.measured_slowdown for point in points],
        ),
        "predicted": (
            [eager.fraction(point.predicted_bytes) for point in points],
            [100 * point.predicted_slowdown for point in points],
        ),
        "bound": (
            [eager.fraction(point.budget_bytes) for point in points],
            [100 * point.lower_bound for point in points],
        ),
    }


def peer_curve(points: Sequence[PeerPoint], eager: EagerRun) -> Curve:
    """The figures of a peer, without the settings that have none."""
    figures = [
        (eager.fraction(point.peak_bytes), 100 * (point.time_ratio - 1))
        for point in points
        if point.peak_bytes is not None and point.time_ratio is not None
    ]
    return [fraction for fraction, _ in figures], [slowdown for _, slowdown in figures]


def _draw_memfit(axes: Any, record: CaseRecord) -> None:
    assert record.eager is not None
    curves = memfit_curves(record, record.eager)
    if not curves["measured"][0]:
        return
    axes.plot(*curves["bound"], ":", color=_GREY, linewidth=1.8, label="memfit: lower bound", zorder=2)
    axes.plot(*curves["predicted"], "o--", color=_BLUE, fillstyle="none", label="memfit: predicted", zorder=3)
    axes.plot(*curves["measured"], "o-", color=_BLUE, linewidth=2.2, label="memfit: measured", zorder=4)


def _draw_peer(axes: Any, eager: EagerRun, peer: str, points: list[PeerPoint]) -> None:
    label, color, marker = _PEER_STYLES[peer]
    fractions, slowdowns = peer_curve(points, eager)
    if not fractions:
        return
    axes.plot(fractions, slowdowns, marker, color=color, markersize=6, alpha=0.85, label=label)
    axes.plot(*peer_curve(pareto(points), eager), "-", color=color, linewidth=1, alpha=0.5)  # its best settings


def _label(axes: Any, case: str, eager: EagerRun) -> None:
    axes.set_title(case, loc="left", fontsize=13, color=_INK)
    axes.set_xlabel(
        f"peak above what persists, as a fraction of eager's ({eager.activation_bytes / 2**20:,.0f} MiB)", fontsize=10.5
    )
    axes.set_ylabel("slowdown against eager, %", fontsize=10.5)
    axes.axhline(0, color=_INK, linewidth=0.8, alpha=0.5)
    axes.set_xlim(left=0)
    axes.grid(color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
