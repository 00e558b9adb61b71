"""A memory history as a drawing: who holds what through time, and how segments are cut up at the peak.

The timeline is `WIDTH` by `HEIGHT` units, as in Note [Drawing] of `timeline.py`.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from memfit.doctor.diagnosis import Diagnosis, SegmentMap, line_of
from memfit.doctor.ledger import Held, Ledger
from memfit.doctor.stacks import BEFORE
from memfit.plan.allocator.history import Action, Event
from memfit.report.breakdown import printable
from memfit.report.timeline import HEIGHT, WIDTH, Tick, ticks
from memfit.units import format_bytes

OTHERS = "everything else"
RESERVED = "reserved, not in use"
_COLOURS = ("activation", "again", "gradient", "output", "temporary", "workspace", "optimizer", "batch")
_LINES_AT_PEAK = 5  # the other colours are for what is big at another time
_MOST_POINTS = 700
_HEADROOM = 1.06
_MOST_ROWS = 26
_ROW_HEIGHT = 14
_ROW_PITCH = 18
_THINNEST = 0.12  # units: parts below cannot be seen, and there may be thousands
_VERBS = {
    Action.ALLOC: "takes",
    Action.FREE_REQUESTED: "lets go of",
    Action.FREE_COMPLETED: "is done with",
    Action.OUT_OF_MEMORY: "is refused",
    Action.SEGMENT_ALLOC: "needs a segment of",
    Action.SEGMENT_MAP: "needs pages of",
    Action.SEGMENT_FREE: "gives a segment back of",
    Action.SEGMENT_UNMAP: "gives pages back of",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """What one line holds through time."""

    label: str
    colour: str  # name in `shades.LIGHT`
    path: str  # SVG path data


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Everything that is drawn of the timeline."""

    bands: tuple[Band, ...]  # from the bottom
    reserved_path: str
    ticks: tuple[Tick, ...]
    peak_index: int  # into points
    points: tuple["Point", ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One moment that is drawn."""

    position: int  # among all events
    left: float  # share of the width
    sizes: tuple[int, ...]  # by band
    reserved_bytes: int
    words: str  # what happens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rectangle:
    """A piece of a segment, in units of the map."""

    left: str
    width: str
    colour: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSegment:
    """One segment of the map."""

    left: str
    top: int
    width: str
    words: str
    parts: tuple[Rectangle, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FragmentationMap:
    """All segments at the peak, largest first, in rows of equal bytes."""

    segments: tuple[DrawnSegment, ...]
    height: int
    row_height: int
    row_bytes: int


def draw(diagnosis: Diagnosis) -> tuple[Timeline, FragmentationMap]:
    """Draw a diagnosis."""
    colours = _colours(diagnosis)
    return _timeline(diagnosis, colours), _map(diagnosis.segments, colours)


def _colours(diagnosis: Diagnosis) -> dict[str, str]:
    """Give lines colours of their own, in the order of the stack: the biggest at the peak, then at any time."""
    at_peak = [row.line for row in diagnosis.owners if row.line != BEFORE][:_LINES_AT_PEAK]
    named = list(dict.fromkeys([*at_peak, *_biggest_at_any_time(diagnosis)]))
    own = dict(zip(named, _COLOURS, strict=False))
    return {BEFORE: "parameter"} | own | {OTHERS: "buffer"}


def _biggest_at_any_time(diagnosis: Diagnosis) -> list[str]:
    """List lines by the most that each ever holds."""
    sizes: Counter[str] = Counter()
    highest: Counter[str] = Counter()
    for change in Ledger(diagnosis.history, diagnosis.replay).changes():
        if change.went is not None:
            sizes[line_of(diagnosis.history, change.went)] -= change.went.size_bytes
        if change.came is not None:
            line = line_of(diagnosis.history, change.came)
            sizes[line] += change.came.size_bytes
            highest[line] = max(highest[line], sizes[line])
    return [line for line, _ in highest.most_common(len(_COLOURS)) if line != BEFORE]


def _timeline(diagnosis: Diagnosis, colours: dict[str, str]) -> Timeline:
    positions = _kept_positions(diagnosis)
    points = tuple(_points(diagnosis, list(colours), positions))
    highest_bytes = max((each.reserved_bytes for each in points), default=1)
    top_bytes = max(1, highest_bytes, diagnosis.peak_bytes) * _HEADROOM
    labels = list(colours)
    shown = [index for index in range(len(labels)) if any(point.sizes[index] for point in points)]
    lower = [0] * len(points)
    bands = []
    for index in shown:
        upper = [below + point.sizes[index] for below, point in zip(lower, points, strict=True)]
        path = _area(points, lower, upper, top_bytes)
        bands.append(Band(label=printable(labels[index]), colour=colours[labels[index]], path=path))
        lower = upper
    return Timeline(
        bands=tuple(bands),
        reserved_path=_line(points, top_bytes),
        ticks=tuple(ticks(top_bytes)),
        peak_index=positions.index(diagnosis.peak_position) if diagnosis.peak_position in positions else 0,
        points=tuple(
            dataclasses.replace(point, sizes=tuple(point.sizes[index] for index in shown)) for point in points
        ),
    )


def _kept_positions(diagnosis: Diagnosis) -> list[int]:
    """Choose of every stretch of events the highest and the lowest, and always the peaks."""
    allocated, reserved = diagnosis.allocated_bytes, diagnosis.reserved_bytes
    stretch = max(1, math.ceil(2 * len(allocated) / _MOST_POINTS))
    kept = {each for each in (diagnosis.peak_position, len(allocated) - 1) if each >= 0}
    kept |= {refusal.position for refusal in diagnosis.refusals[-10:]}
    if reserved:
        kept.add(max(range(len(reserved)), key=reserved.__getitem__))
    for start in range(0, len(allocated), stretch):
        positions = range(start, min(start + stretch, len(allocated)))
        kept |= {max(positions, key=allocated.__getitem__), min(positions, key=allocated.__getitem__)}
    return sorted(kept)


def _points(diagnosis: Diagnosis, labels: Sequence[str], positions: Sequence[int]) -> Iterator[Point]:
    history = diagnosis.history
    ledger = Ledger(history, diagnosis.replay)
    names = set(labels)
    sizes: Counter[str] = Counter()

    def label(held: Held) -> str:
        line = line_of(history, held)
        return line if line in names else OTHERS

    for held in ledger.blocks.values():
        sizes[label(held)] += held.size_bytes if held.is_allocated else 0
    wanted = set(positions)
    for change in ledger.changes():
        if change.went is not None:
            sizes[label(change.went)] -= change.went.size_bytes
        if change.came is not None:
            sizes[label(change.came)] += change.came.size_bytes
        if ledger.position in wanted:
            yield Point(
                position=ledger.position,
                left=ledger.position / len(history.events),
                sizes=tuple(sizes[each] for each in labels),
                reserved_bytes=ledger.reserved_bytes,
                words=_event_words(diagnosis, history.events[ledger.position], ledger.position),
            )


def _event_words(diagnosis: Diagnosis, event: Event, position: int) -> str:
    held = Held(event.size_bytes, event.size_bytes, event.frame, position, True)
    return printable(f"{line_of(diagnosis.history, held)} {_VERBS[event.action]} {format_bytes(event.size_bytes)}")


def _area(points: Sequence[Point], lower: Sequence[int], upper: Sequence[int], top_bytes: float) -> str:
    """Go along the upper edge in steps, and back along the lower."""
    edges = _edges(points)
    there = [f"V{_height(upper[index], top_bytes)}H{edges[index + 1]}" for index in range(len(points))]
    back = [f"V{_height(lower[index], top_bytes)}H{edges[index]}" for index in reversed(range(len(points)))]
    return f"M{edges[0]} {HEIGHT}{''.join(there)}{''.join(back)}Z"


def _line(points: Sequence[Point], top_bytes: float) -> str:
    edges = _edges(points)
    steps = (f"V{_height(each.reserved_bytes, top_bytes)}H{edges[at + 1]}" for at, each in enumerate(points))
    return f"M{edges[0]} {_height(points[0].reserved_bytes, top_bytes)}{''.join(steps)}" if points else ""


def _edges(points: Sequence[Point]) -> list[str]:
    return [*(_number(point.left * WIDTH) for point in points), _number(WIDTH)]


def _map(segments: Sequence[SegmentMap], colours: dict[str, str]) -> FragmentationMap:
    """Lay segments out in rows, largest first: a segment is never broken over two."""
    total_bytes = sum(each.size_bytes for each in segments)
    largest_bytes = max((each.size_bytes for each in segments), default=1)
    row_bytes = max(largest_bytes, math.ceil(total_bytes / _MOST_ROWS))
    drawn, row, used_bytes = [], 0, 0
    for segment in sorted(segments, key=lambda each: (each.is_small, -each.size_bytes, each.address)):
        if used_bytes and used_bytes + segment.size_bytes > row_bytes:
            row, used_bytes = row + 1, 0
        drawn.append(_drawn(segment, used_bytes, row, row_bytes, colours))
        used_bytes += segment.size_bytes
    return FragmentationMap(
        segments=tuple(drawn), height=(row + 1) * _ROW_PITCH, row_height=_ROW_HEIGHT, row_bytes=row_bytes
    )


def _drawn(segment: SegmentMap, start_bytes: int, row: int, row_bytes: int, colours: dict[str, str]) -> DrawnSegment:
    unit = WIDTH / row_bytes
    parts, offset = [], start_bytes
    for part in segment.parts:
        if part.line and part.size_bytes * unit >= _THINNEST:
            colour = colours.get(part.line, colours[OTHERS])
            parts.append(Rectangle(left=_number(offset * unit), width=_number(part.size_bytes * unit), colour=colour))
        offset += part.size_bytes
    kind = "small" if segment.is_small else "large"
    return DrawnSegment(
        left=_number(start_bytes * unit),
        top=row * _ROW_PITCH,
        width=_number(segment.size_bytes * unit),
        words=f"{format_bytes(segment.size_bytes)} of the {kind} pool, {format_bytes(segment.free_bytes)} free, "
        f"{format_bytes(segment.largest_free_bytes)} in one piece",
        parts=tuple(parts),
    )


def _height(size_bytes: int, top_bytes: float) -> str:
    return _number(HEIGHT * (1 - size_bytes / top_bytes))


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
