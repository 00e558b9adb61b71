"""The live bytes of a step as a drawing: where every line goes, before any markup.

Note [Drawing]
    A drawing is `WIDTH` by `HEIGHT` units, stretched to whatever place it gets; words are put
    beside it by percentages, so that they are not stretched. A moment is drawn as a step from
    its operation to the next one, because its bytes are live for as long as it runs.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from memfit.estimate import Estimate
from memfit.ir import Kind
from memfit.plan.simulate import Moment
from memfit.report.breakdown import printable
from memfit.report.limit import Limit
from memfit.units import format_bytes

WIDTH, HEIGHT = 1000, 400
_MOST_POINTS = 800  # more than the pixels of a phone, and still a small file
_LEAST_REGION_SHARE = 0.03  # the optimizer's step is one moment, and must be seen
_HEADROOM = 1.1
_HIGHEST_LIMIT = 2.5  # times the peak: a limit further up would press the curve flat
_MOST_TICKS = 6
# From the bottom: what is there all the time, then what comes and goes.
_STACK = (
    *(Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER, Kind.BATCH, Kind.GRADIENT),
    *(Kind.OUTPUT, Kind.ACTIVATION, Kind.TEMPORARY, Kind.WORKSPACE),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The bytes of one kind through the step."""

    kind: str
    path: str  # SVG path data


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """One pass of the step."""

    phase: str
    start: int  # position of its first moment
    stop: int
    left: float  # shares of the width
    width: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One moment that is drawn."""

    position: int  # among all moments of the step
    left: float  # share of the width
    moment: Moment


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A height with a name."""

    label: str
    bottom: float  # share of the height


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One place in the drawing."""

    left: float  # shares of width and height
    bottom: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """Everything that is drawn."""

    bands: tuple[Band, ...]
    regions: tuple[Region, ...]
    points: tuple[Point, ...]
    ticks: tuple[Tick, ...]
    peak_index: int  # into points
    peak: Mark
    limit: Tick | None  # None: not asked about, or far above
    moment_count: int


def draw(estimate: Estimate, limit: Limit | None = None, *, most_points: int = _MOST_POINTS) -> Drawing:
    """Lay the step out. The peak is always among the points, see Note [Drawing]."""
    timeline = estimate.timeline
    regions = tuple(_regions(timeline.moments))
    positions = kept_positions(timeline.moments, timeline.peak_position, most_points)
    points = tuple(_point(position, timeline.moments, regions) for position in positions)
    peak_index = positions.index(timeline.peak_position)
    limit_bytes = None if limit is None else limit.usable_bytes
    top_bytes = _top_bytes(estimate.peak_bytes, limit_bytes)
    return Drawing(
        bands=tuple(_bands(points, top_bytes)),
        regions=regions,
        points=points,
        ticks=tuple(ticks(top_bytes)),
        peak_index=peak_index,
        peak=Mark(left=_middle(points, peak_index), bottom=estimate.peak_bytes / top_bytes),
        limit=_limit_tick(limit, top_bytes),
        moment_count=len(timeline.moments),
    )


def kept_positions(moments: Sequence[Moment], peak_position: int, most_points: int) -> list[int]:
    """Which moments to draw: of every stretch the highest and the lowest, and always the peak.

    The first moment of every pass stays too, so that the regions begin where they do.
    """
    if len(moments) <= most_points:
        return list(range(len(moments)))
    stretch = math.ceil(2 * len(moments) / most_points)
    kept = {peak_position, *(start for _, start, _ in _phases(moments))}
    for start in range(0, len(moments), stretch):
        positions = range(start, min(start + stretch, len(moments)))
        kept.add(max(positions, key=lambda position: moments[position].live_bytes))
        kept.add(min(positions, key=lambda position: moments[position].live_bytes))
    return sorted(kept)


def _phases(moments: Sequence[Moment]) -> Iterator[tuple[str, int, int]]:
    start = 0
    for phase, group in itertools.groupby(moments, key=lambda moment: str(moment.phase)):
        stop = start + sum(1 for _ in group)
        yield phase, start, stop
        start = stop


def _regions(moments: Sequence[Moment]) -> Iterator[Region]:
    phases = list(_phases(moments))
    shares = [max(_LEAST_REGION_SHARE, (stop - start) / len(moments)) for _, start, stop in phases]
    left = 0.0
    for (phase, start, stop), share in zip(phases, shares, strict=True):
        width = share / sum(shares)
        yield Region(phase=phase, start=start, stop=stop, left=left, width=width)
        left += width


def _point(position: int, moments: Sequence[Moment], regions: Sequence[Region]) -> Point:
    region = next(region for region in regions if position < region.stop)
    within = (position - region.start) / (region.stop - region.start)
    return Point(position=position, left=region.left + within * region.width, moment=moments[position])


def _middle(points: Sequence[Point], index: int) -> float:
    """Of the step that a point is drawn as."""
    right = points[index + 1].left if index + 1 < len(points) else 1.0
    return (points[index].left + right) / 2


def _bands(points: Sequence[Point], top_bytes: float) -> Iterator[Band]:
    lower = [0] * len(points)
    for kind in _STACK:
        sizes = [point.moment.by_kind.get(kind, 0) for point in points]
        if not any(sizes):
            continue
        upper = [below + size for below, size in zip(lower, sizes, strict=True)]
        yield Band(kind=str(kind), path=_path(points, lower, upper, top_bytes))
        lower = upper


def _path(points: Sequence[Point], lower: Sequence[int], upper: Sequence[int], top_bytes: float) -> str:
    """There along the upper edge in steps, and back along the lower."""
    edges = [_number(point.left * WIDTH) for point in points] + [_number(WIDTH)]
    there = [f"V{_height(upper[index], top_bytes)}H{edges[index + 1]}" for index in range(len(points))]
    back = [f"V{_height(lower[index], top_bytes)}H{edges[index]}" for index in reversed(range(len(points)))]
    return f"M{edges[0]} {HEIGHT}{''.join(there)}{''.join(back)}Z"


def _height(size_bytes: int, top_bytes: float) -> str:
    return _number(HEIGHT * (1 - size_bytes / top_bytes))


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _top_bytes(peak_bytes: int, limit_bytes: int | None) -> float:
    highest = peak_bytes
    if limit_bytes is not None and limit_bytes <= _HIGHEST_LIMIT * peak_bytes:
        highest = max(peak_bytes, limit_bytes)
    return max(1, highest) * _HEADROOM


def _limit_tick(limit: Limit | None, top_bytes: float) -> Tick | None:
    if limit is None or limit.usable_bytes > top_bytes:
        return None
    words = f"{limit.label}, {format_bytes(limit.usable_bytes)} usable" if limit.is_device else f"limit {limit.label}"
    return Tick(label=words, bottom=limit.usable_bytes / top_bytes)


def ticks(top_bytes: float) -> Iterator[Tick]:
    """Yield round numbers of one unit, up to `top_bytes`."""
    unit, unit_bytes = _unit(top_bytes)
    units = top_bytes / unit_bytes
    step = next(step for step in _round_steps() if units / step <= _MOST_TICKS)
    for index in range(math.floor(units / step) + 1):
        yield Tick(label=f"{index * step:g} {unit}" if index else "0", bottom=index * step / units)


def _unit(size_bytes: float) -> tuple[str, int]:
    units = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    return next(((name, size) for name, size in units.items() if size_bytes >= size), ("B", 1))


def _round_steps() -> Iterator[float]:
    for exponent in itertools.count(-1):
        for digit in (1, 2, 5):
            yield digit * 10.0**exponent


def data_for_script(drawing: Drawing) -> Mapping[str, object]:
    """What the page needs to answer a pointer or a key."""
    kinds = [band.kind for band in drawing.bands]
    return {
        "kinds": kinds,
        "count": drawing.moment_count,
        "peak": drawing.peak_index,
        "points": [
            {
                "left": round(point.left, 5),
                "position": point.position,
                "phase": str(point.moment.phase),
                "operation": printable(point.moment.label),
                "module": printable(point.moment.module),
                "sizes": [point.moment.by_kind.get(Kind(kind), 0) for kind in kinds],
            }
            for point in drawing.points
        ],
    }
