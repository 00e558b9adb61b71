"""The timeline as a table: how high each module gets in each pass, planned and unplanned."""

import dataclasses
from collections.abc import Iterator

from memfit.report.plan_summary import OUTSIDE
from memfit.report.story import Moment, Story, Track

MOST_ROWS = 400


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassRow:
    """One module in one pass."""

    phase: str
    module: str
    unplanned_bytes: int | None  # None: nothing of it runs there
    planned_bytes: int | None
    again: int  # operations that run again


def pass_rows(story: Story, depth: int) -> list[PassRow]:
    """In the order of the step; `depth` is how many names deep modules are told apart."""
    unplanned = dict(_highest(story.unplanned, story, depth))
    planned = dict(_highest(story.planned, story, depth))
    again: dict[tuple[str, str], int] = {}
    for moment in story.planned.moments:
        if moment.is_again:
            key = _key(moment, depth)
            again[key] = again.get(key, 0) + 1
    return [
        PassRow(
            phase=key[0],
            module=key[1] or OUTSIDE,
            unplanned_bytes=unplanned.get(key),
            planned_bytes=planned.get(key),
            again=again.get(key, 0),
        )
        for key in list(dict.fromkeys([*unplanned, *planned]))[:MOST_ROWS]
    ]


def _highest(track: Track, story: Story, depth: int) -> Iterator[tuple[tuple[str, str], int]]:
    found: dict[tuple[str, str], int] = {}
    for moment, live_bytes in zip(track.moments, track.totals(story.values), strict=True):
        key = _key(moment, depth)
        found[key] = max(found.get(key, 0), live_bytes)
    yield from found.items()


def _key(moment: Moment, depth: int) -> tuple[str, str]:
    return (moment.phase, ".".join(moment.module.split(".")[:depth]))
