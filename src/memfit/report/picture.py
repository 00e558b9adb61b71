"""The timeline of a plan as a picture for papers: PNG or SVG, drawn by matplotlib (the `plots` extra)."""

import importlib.util
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memfit.errors import InvalidInput
from memfit.plan.plan import Plan
from memfit.report.curve import round_step
from memfit.report.shades import LIGHT, SHADES, slug
from memfit.report.story import Story, Track, stories_of
from memfit.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCHES = (7.2, 3.6)
_DOTS_PER_INCH = 200
_MOST_POINTS = 700  # more would only make an SVG big
_OPTIMIZER_SHARE = 0.03
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def picture(plan: Plan, file_format: str) -> bytes:
    """The timeline of a plan in "png" or "svg"."""
    story = story_to_draw(plan)
    figure = timeline_figure(story, plan, _SIZE_INCHES)
    buffer = io.BytesIO()
    import matplotlib

    # Without a date and with one salt, so that one plan makes one file.
    with matplotlib.rc_context({"svg.hashsalt": "memfit", "svg.fonttype": "path"}):
        metadata = {"Date": None} if file_format == "svg" else {"Software": "memfit"}
        figure.savefig(buffer, format=file_format, dpi=_DOTS_PER_INCH, metadata=metadata)
    return buffer.getvalue()


def require_matplotlib() -> None:
    """Say clearly what is missing, before anything is drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput(
            'pictures and films are drawn by matplotlib, which is not installed; pip install "memfit[plots]", or write '
            "the page (--format html), which needs nothing"
        )


def story_to_draw(plan: Plan) -> Story:
    """The one step a picture can show."""
    require_matplotlib()
    stories = stories_of(plan)
    if not stories:
        raise InvalidInput(
            "this plan was written without the step it was made for, so there is no timeline to draw; plan again, or "
            "write the page (--format html), which shows the rest"
        )
    if plan.regions:
        raise InvalidInput(
            "this plan is made of regions and has no timeline of the whole step to draw; write the page "
            "(--format html), which shows one region at a time"
        )
    return stories[0]


def timeline_figure(story: Story, plan: Plan, size_inches: tuple[float, float]) -> "Figure":
    """The planned step stacked by kind, the unplanned one as a line, the budget as another."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches, layout="constrained")
    axes = figure.add_subplot()
    name, unit = _unit(max(story.unplanned.peak_bytes, plan.budget_bytes or 0))
    _draw_stack(axes, story, unit)
    edges, heights = _steps(story.unplanned, story.unplanned.totals(story.values), axis_end(story))
    axes.step(edges, [height / unit for height in heights], where="post", color=LIGHT["ink"], linewidth=1.1)
    axes.plot([], [], color=LIGHT["ink"], linewidth=1.1, label=f"unplanned, {format_bytes(story.unplanned.peak_bytes)}")
    if plan.budget_bytes is not None:
        label = f"budget, {format_bytes(plan.budget_bytes)}"
        axes.axhline(plan.budget_bytes / unit, color=LIGHT["budget"], linestyle=(0, (5, 3)), linewidth=1.3, label=label)
    _draw_passes(axes, story.planned)
    highest = max(story.unplanned.peak_bytes, story.planned.peak_bytes, plan.budget_bytes or 0)
    axes.set_ylim(0, 1.06 * highest / unit)
    axes.set_xlim(0, axis_end(story))
    axes.set_ylabel(f"live memory ({name})", fontsize=8)
    axes.set_title(
        f"{plan.model}: {format_bytes(plan.peak_bytes)} instead of {format_bytes(plan.unplanned_peak_bytes)}, "
        f"{plan.slowdown:+.1%} time".replace("$", r"\$"),
        fontsize=9,
        loc="left",
    )
    axes.tick_params(labelsize=8, length=3)
    axes.yaxis.set_ticks(_round_ticks(1.06 * highest / unit))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=7, frameon=False)
    return figure


def _draw_stack(axes: "Axes", story: Story, unit: int) -> None:
    stacked = story.planned.stacked(story.values)
    shown = [shade for shade in SHADES if any(stacked[shade])]
    kept = _kept(story.planned.totals(story.values))
    edges = _edges(story.planned, kept, axis_end(story))
    lower = [0.0] * len(edges)
    for shade in shown:
        column = [stacked[shade][index] / unit for index in kept]
        upper = [below + size for below, size in zip(lower, [*column, column[-1]], strict=True)]
        colour = LIGHT[slug(shade)]
        axes.fill_between(edges, lower, upper, step="post", color=colour, linewidth=0, label=str(shade))
        lower = upper


def axis_end(story: Story) -> float:
    """Where the axis ends: the optimizer's step is one moment, and must be seen."""
    ends = story.planned.moments[-1].phase == "optimizer"
    return story.place_count * (1 + _OPTIMIZER_SHARE if ends else 1)


def _kept(totals: Sequence[int]) -> list[int]:
    """All moments, or the highest of each stretch of them."""
    stretch = -(-len(totals) // _MOST_POINTS)
    return [
        max(range(start, min(start + stretch, len(totals))), key=totals.__getitem__)
        for start in range(0, len(totals), stretch)
    ]


def _edges(track: Track, kept: Sequence[int], end: float) -> list[float]:
    """Where each moment begins, and where the last one ends."""
    return [0.0, *(float(track.places[index]) for index in kept[1:]), end]


def _steps(track: Track, totals: Sequence[int], end: float) -> tuple[list[float], list[int]]:
    kept = _kept(totals)
    return _edges(track, kept, end), [*(totals[index] for index in kept), totals[kept[-1]]]


def _draw_passes(axes: "Axes", track: Track) -> None:
    starts = [0] + [
        number
        for number in range(1, len(track.moments))
        if track.moments[number].phase != track.moments[number - 1].phase
    ]
    phases = [track.moments[start].phase for start in starts]
    axes.xaxis.set_ticks([track.places[start] for start in starts], phases)
    for label, phase in zip(axes.get_xticklabels(), phases, strict=True):
        label.set_horizontalalignment("center" if phase == "optimizer" else "left")
    for start in starts[1:]:
        axes.axvline(track.places[start], color=LIGHT["soft"], linewidth=0.6, linestyle=":")


def _unit(size_bytes: int) -> tuple[str, int]:
    name = format_bytes(size_bytes).rpartition(" ")[2]
    return name, _UNITS[name]


def _round_ticks(highest: float) -> list[float]:
    step = round_step(highest, 6)
    return [number * step for number in range(int(highest / step) + 1)]
