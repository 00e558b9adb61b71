"""The story of a plan: what lives when in the planned and in the unplanned step, walked again from the plan alone.

Note [One axis]
    Both steps are drawn over one axis of places. An operation that both run has one place, so that above it stand two
    figures of the same moment; what one step runs alone (what is computed again, above all) has a place of its own,
    over which the other step stands still.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from memfit.errors import InvalidFile
from memfit.ir import Graph, Kind, Program
from memfit.plan.captured import CapturedStep
from memfit.plan.lives import Course, Life, course_of
from memfit.plan.plan import Plan
from memfit.plan.replays import kept_states_bytes, replay_bytes
from memfit.plan.simulate import Timeline, simulate
from memfit.report.breakdown import printable
from memfit.report.shades import SHADES, Shade, shade_of
from memfit.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A storage, as people know it."""

    name: str
    module: str
    kind: Kind
    size_bytes: int  # as the allocator rounds it
    shape: str
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One operation that runs."""

    label: str
    target: str
    module: str
    phase: str
    technique: str
    is_again: bool
    workspace_bytes: int
    time_us: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Track:
    """One of the two steps."""

    moments: tuple[Moment, ...]
    places: tuple[int, ...]  # of the moments, see Note [One axis]
    lives: tuple[Life, ...]  # storages are numbers of values of the story
    base_bytes: dict[Shade, int]  # live all the time without being a value
    peak_position: int
    peak_bytes: int

    def stacked(self, values: Sequence[Value]) -> dict[Shade, list[int]]:
        """Live bytes by shade and by moment."""
        count = len(self.moments)
        changes = {shade: [0] * (count + 1) for shade in SHADES}
        for life in self.lives:
            column = changes[shade_of(values[life.storage].kind, is_again=life.is_again)]
            column[life.start] += values[life.storage].size_bytes
            column[life.stop] -= values[life.storage].size_bytes
        sums = {shade: list(itertools.accumulate(column[:count])) for shade, column in changes.items()}
        for shade, size_bytes in self.base_bytes.items():
            sums[shade] = [size + size_bytes for size in sums[shade]]
        sums[Shade.WORKSPACE] = [moment.workspace_bytes for moment in self.moments]
        return sums

    def totals(self, values: Sequence[Value]) -> list[int]:
        """Live bytes by moment."""
        return [sum(column) for column in zip(*self.stacked(values).values(), strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story:
    """Planned and unplanned, side by side."""

    name: str  # of the region; "" is the whole model
    values: tuple[Value, ...]
    planned: Track
    unplanned: Track
    place_count: int


def stories_of(plan: Plan) -> list[Story]:
    """One for the whole step, or one for each region; none if the plan is of an old version.

    Raises InvalidFile where the walk does not come to what the plan says.
    """
    if plan.step is not None:
        return [_story(plan, plan.step, "")]
    return [_story(each, each.step, name) for name, each in plan.regions.items() if each.step is not None]


def _story(plan: Plan, step: CapturedStep, name: str) -> Story:
    _check_digest(plan, step)
    teller = _Teller(step, _Times(step, plan.step_us))
    planned = teller.track(step.graph, plan.program, step.workspace_bytes)
    unplanned = teller.track(step.eager, step.unplanned_program(), step.eager_workspace_bytes)
    _check_peak(plan.peak_bytes, planned, "planned")
    _check_peak(plan.unplanned_peak_bytes, unplanned, "unplanned")
    planned_places, unplanned_places, count = common_places(planned.moments, unplanned.moments)
    return Story(
        name=name,
        values=tuple(teller.values),
        planned=dataclasses.replace(planned, places=tuple(planned_places)),
        unplanned=dataclasses.replace(unplanned, places=tuple(unplanned_places)),
        place_count=count,
    )


def _check_digest(plan: Plan, step: CapturedStep) -> None:
    found = step.graph.digest()
    if found != plan.program.graph_digest:
        raise InvalidFile(
            f"damaged plan: its program is for a graph of digest {plan.program.graph_digest}, and the step it carries "
            f"has {found}; plan again"
        )


def _check_peak(written_bytes: int, track: Track, noun: str) -> None:
    if written_bytes != track.peak_bytes:
        raise InvalidFile(
            f"damaged plan: it says that the {noun} peak is {format_bytes(written_bytes)}, and its own step comes to "
            f"{format_bytes(track.peak_bytes)}; plan again"
        )


class _Times:
    """Microseconds of a run, by the name of its operation.

    What the eager run alone has was timed together: each gets the same part of what the eager step takes beyond the
    operations that are known.
    """

    def __init__(self, step: CapturedStep, step_us: float) -> None:
        operations = (*step.graph.operations, *step.graph.alternatives)
        costs = zip(operations, step.time_us, step.in_place_us, strict=True)
        self._by_name = {each.name: (fresh_us, in_place_us) for each, fresh_us, in_place_us in costs}
        own = [(each.name, each.overwrites is not None) for each in step.eager.operations]
        known_us = sum(self._by_name[name][in_place] for name, in_place in own if name in self._by_name)
        unknown = sum(1 for name, _ in own if name not in self._by_name)
        self._unknown_us = max(0.0, step_us - known_us) / max(1, unknown)

    def of(self, name: str, *, in_place: bool) -> float:
        time_us = self._by_name.get(name, (self._unknown_us, self._unknown_us))[in_place]
        return time_us if math.isfinite(time_us) else 0.0


class _Teller:
    """Tells tracks over one list of values."""

    def __init__(self, step: CapturedStep, times: _Times) -> None:
        self._step = step
        self._times = times
        self._numbers: dict[Value, int] = {}

    @property
    def values(self) -> list[Value]:
        return list(self._numbers)

    def track(self, graph: Graph, program: Program, workspace_bytes: Sequence[int]) -> Track:
        timeline, course = self._walked(graph, program, workspace_bytes)
        numbers = [self._number(graph, storage) for storage in range(len(graph.storages))]
        return Track(
            moments=tuple(_moments(graph, course, workspace_bytes, self._step, self._times)),
            places=(),
            lives=tuple(dataclasses.replace(life, storage=numbers[life.storage]) for life in course.lives),
            base_bytes={
                Shade.OPTIMIZER: self._step.optimizer.state_bytes,
                Shade.ACTIVATION: kept_states_bytes(graph, program),
                Shade.BATCH: 0 if self._step.loss is None else self._step.loss.batch_bytes,
            },
            peak_position=timeline.peak_position,
            peak_bytes=timeline.peak_bytes,
        )

    def _walked(self, graph: Graph, program: Program, workspace_bytes: Sequence[int]) -> tuple[Timeline, Course]:
        try:
            timeline = simulate(
                graph,
                program,
                workspace_bytes=workspace_bytes,
                optimizer=self._step.optimizer,
                loss=self._step.loss,
                granularity_bytes=self._step.granularity_bytes,
            )
            return timeline, course_of(graph, program, self._step.optimizer, self._step.loss)
        except IndexError:
            raise InvalidFile(
                "damaged plan: its program frees or runs what is not there in the step it carries; plan again"
            ) from None

    def _number(self, graph: Graph, index: int) -> int:
        storage = graph.storages[index]
        block_bytes = self._step.granularity_bytes
        value = Value(
            name=printable(storage.name),
            module=printable(storage.module),
            kind=storage.kind,
            size_bytes=-(-storage.size_bytes // block_bytes) * block_bytes,
            shape="x".join(map(str, storage.shape)) or "scalar",
            dtype=printable(storage.dtype),
        )
        return self._numbers.setdefault(value, len(self._numbers))


def _moments(
    graph: Graph, course: Course, workspace_bytes: Sequence[int], step: CapturedStep, times: _Times
) -> Iterator[Moment]:
    beside_bytes = 0  # of a loss outside, when it has run
    for run in course.runs:
        if run.operation is None:
            loss = step.loss if run.phase == "loss" else None
            working_bytes = step.optimizer.workspace_bytes if loss is None else loss.working_bytes
            yield Moment(
                label="step" if loss is None else "loss",
                target="the optimizer's step" if loss is None else "the loss",
                module="",
                phase=run.phase,
                technique="",
                is_again=False,
                workspace_bytes=working_bytes + beside_bytes,
                time_us=0.0,
            )
            beside_bytes = beside_bytes if loss is None else loss.lasting_bytes
            continue
        operation = graph.operation(run.operation)
        yield Moment(
            label=printable(operation.name),
            target=printable(operation.target),
            module=printable(operation.module),
            phase=run.phase,
            technique=printable(operation.technique),
            is_again=run.is_again,
            workspace_bytes=workspace_bytes[run.operation] + replay_bytes(operation, run.phase) + beside_bytes,
            time_us=times.of(operation.name, in_place=run.in_place),
        )


def common_places(planned: Sequence[Moment], unplanned: Sequence[Moment]) -> tuple[list[int], list[int], int]:
    """Where the moments of both steps stand on one axis, and how long that is. See Note [One axis]."""
    pairs = _pairs(planned, unplanned)
    planned_places, unplanned_places = [0] * len(planned), [0] * len(unplanned)
    here = place = there = 0
    for planned_index, unplanned_index in [*pairs, (len(planned), len(unplanned))]:
        while there < unplanned_index:
            unplanned_places[there] = place
            there, place = there + 1, place + 1
        while here < planned_index:
            planned_places[here] = place
            here, place = here + 1, place + 1
        if here < len(planned) and there < len(unplanned):
            planned_places[here] = unplanned_places[there] = place
            here, there, place = here + 1, there + 1, place + 1
    return planned_places, unplanned_places, place


def _pairs(planned: Sequence[Moment], unplanned: Sequence[Moment]) -> list[tuple[int, int]]:
    """The longest row of operations that both steps run in the same order."""
    places = {moment.label: index for index, moment in enumerate(unplanned) if not moment.is_again}
    found = [
        (index, places[moment.label])
        for index, moment in enumerate(planned)
        if not moment.is_again and moment.label in places
    ]
    ends: list[int] = []  # the lowest place that a row of each length can end at
    last: list[int] = []  # which of `found` that is
    before: list[int | None] = []
    for number, (_, place) in enumerate(found):
        length = bisect.bisect_left(ends, place)
        before.append(last[length - 1] if length else None)
        ends[length : length + 1] = [place]
        last[length : length + 1] = [number]
    row: list[tuple[int, int]] = []
    current = last[-1] if last else None
    while current is not None:
        row.append(found[current])
        current = before[current]
    return row[::-1]
