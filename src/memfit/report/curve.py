"""The frontier beside a plan: points from a file or from a `Frontier`, and where each is drawn."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from memfit.errors import InvalidFile, first_line
from memfit.files import parse_json
from memfit.plan.frontier import FORMAT, VERSION, Frontier, activation_fraction
from memfit.plan.plan import Plan
from memfit.units import format_bytes

_MOST_TICKS = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """One plan of the frontier."""

    peak_bytes: int
    activation_fraction: float
    slowdown: float
    lower_bound: float

    @classmethod
    def of_plan(cls, plan: Plan) -> Self:
        return cls(
            peak_bytes=plan.peak_bytes,
            activation_fraction=activation_fraction(plan),
            slowdown=plan.slowdown,
            lower_bound=plan.lower_bound,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A named place on an axis, as a share of it."""

    label: str
    at: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A place in the drawing, from the bottom left, as shares of it."""

    x: float
    y: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Everything that is drawn, and the rows of the table beside it."""

    rows: tuple[CurvePoint, ...]
    points: tuple[Dot, ...]
    line: str  # of an SVG polyline over 100 by 100 units
    bound_line: str
    chosen: Dot
    budget: float | None
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def points_of(frontier: Frontier) -> list[CurvePoint]:
    """The points of a curve that was just computed."""
    return [CurvePoint.of_plan(plan) for plan in frontier]


def load_points(path: str | Path) -> list[CurvePoint]:
    """The points of a curve that `memfit frontier` wrote; a file that is not one is refused with the reason."""
    try:
        fields = parse_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidFile(f"{path} cannot be read as a frontier: {first_line(error)}") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise InvalidFile(f"{path} is not a frontier: its format is not {FORMAT!r}; write one with memfit frontier")
    if fields.get("version") != VERSION:
        raise InvalidFile(
            f"{path} is a frontier of version {fields.get('version')!r}, this memfit reads version {VERSION}; "
            "compute it again, or install the memfit that wrote it"
        )
    try:
        return [_point(each) for each in fields["points"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidFile(f"{path} is a damaged frontier: {type(error).__name__}: {first_line(error)}") from None


def _point(fields: Mapping[str, Any]) -> CurvePoint:
    names = [field.name for field in dataclasses.fields(CurvePoint)]
    for name in names:
        value = fields[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}")
    return CurvePoint(**{name: fields[name] for name in names})


def draw(points: Sequence[CurvePoint], plan: Plan) -> Curve:
    """Lay a curve out, with the plan on it."""
    chosen = CurvePoint.of_plan(plan)
    every = sorted({*points, chosen}, key=lambda point: point.peak_bytes)
    marks_bytes = [point.peak_bytes for point in every] + ([plan.budget_bytes] if plan.budget_bytes else [])
    x = _Axis.over(marks_bytes)
    y = _Axis.over([0.0, *(point.slowdown for point in every), *(point.lower_bound for point in every)])
    rows = tuple(sorted(points, key=lambda point: -point.peak_bytes))
    return Curve(
        rows=rows,
        points=tuple(Dot(x=x.share(point.peak_bytes), y=y.share(point.slowdown)) for point in rows),
        line=_polyline((x.share(point.peak_bytes), y.share(point.slowdown)) for point in rows),
        bound_line=_polyline((x.share(point.peak_bytes), y.share(point.lower_bound)) for point in rows),
        chosen=Dot(x=x.share(chosen.peak_bytes), y=y.share(chosen.slowdown)),
        budget=x.share(plan.budget_bytes) if plan.budget_bytes else None,
        x_ticks=tuple(_byte_ticks(x)),
        y_ticks=tuple(_percent_ticks(y)),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Self:
        low, high = min(values), max(values)
        room = 0.06 * (high - low) or abs(high) * 0.05 or 1.0
        return cls(low - room, high + room)

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def round_step(width: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that cuts a width into at most so many parts.

    >>> round_step(0.23, 5), round_step(900, 5)
    (0.05, 200.0)
    """
    step = 10.0 ** math.floor(math.log10(width / most))
    return next(step * factor for factor in (1, 2, 5, 10) if width / (step * factor) <= most)


def _round_values(axis: _Axis, unit: float) -> Iterator[float]:
    step = round_step((axis.high - axis.low) / unit, _MOST_TICKS)
    first = math.ceil(axis.low / unit / step)
    yield from (number * step for number in range(first, math.floor(axis.high / unit / step) + 1))


def _byte_ticks(axis: _Axis) -> Iterator[Tick]:
    name = format_bytes(axis.high).rpartition(" ")[2]
    unit = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[name]
    for value in _round_values(axis, unit):
        yield Tick(label=f"{value:.6g} {name}", at=axis.share(value * unit))


def _percent_ticks(axis: _Axis) -> Iterator[Tick]:
    for value in _round_values(axis, 0.01):
        yield Tick(label=f"{value:+.6g}%" if value else "0%", at=axis.share(value * 0.01))


def _polyline(points: Iterator[tuple[float, float]]) -> str:
    return " ".join(f"{100 * x:.2f},{100 * (1 - y):.2f}" for x, y in points)
