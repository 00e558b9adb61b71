"""What has become of each value at a moment of the planned and of the unplanned step, for the film.

The page's script has the same rule (`stateOf` in `plan_page.js`); a test in the browser holds one against the other.
"""

import dataclasses
from collections import defaultdict
from enum import StrEnum

from memfit.plan.plan import Plan, Treatment
from memfit.report.story import Story, Track
from memfit.report.story_data import tiles_of


class State(StrEnum):
    """What a tile shows."""

    WAITING = "not made yet"
    LIVE = "kept"
    BACK = "computed again"
    DROPPED = "dropped"
    SMALL = "in a smaller form"
    OUT = "sent out"
    DONE = "not needed any more"


@dataclasses.dataclass(frozen=True, slots=True)
class Stay:
    """One stay of a value in memory."""

    start: int
    stop: int
    is_again: bool


class Tiles:
    """The values a plan decides about, in the order the forward pass makes them."""

    def __init__(self, story: Story, plan: Plan) -> None:
        self._tiles = [(number, tuple(Treatment)[treatment]) for number, treatment in tiles_of(story, plan)]
        self._planned = _stays(story.planned)
        self._unplanned = _stays(story.unplanned)
        self.sizes = [story.values[number].size_bytes for number, _ in self._tiles]

    def unplanned(self, position: int) -> list[State]:
        """At a moment of the unplanned step."""
        return [self._plain(number, position) for number, _ in self._tiles]

    def planned(self, position: int, unplanned_position: int) -> list[State]:
        """At a moment of the planned step; the unplanned one tells how long a value is needed."""
        return [self._decided(number, each, position, unplanned_position) for number, each in self._tiles]

    def _plain(self, number: int, position: int) -> State:
        stays = self._unplanned[number]
        found = _present(stays, position)
        if found is not None:
            return found
        return State.DROPPED if any(stay.start > position for stay in stays) else State.DONE

    def _decided(self, number: int, treatment: Treatment, position: int, unplanned_position: int) -> State:
        stays = self._planned[number]
        found = _present(stays, position)
        if found is not None:
            return found
        comes_back = any(stay.start > position for stay in stays)
        needed_until = max((stay.stop for stay in self._unplanned[number]), default=0)
        if not comes_back and unplanned_position >= needed_until:
            return State.DONE
        if treatment is Treatment.MOVED:
            return State.OUT
        if treatment is Treatment.REPLACED:
            return State.SMALL
        return State.DROPPED if comes_back else State.DONE


def _present(stays: list[Stay], position: int) -> State | None:
    """What a value is if it is in memory or was never made; None if it was there and is gone."""
    if not stays or position < stays[0].start:
        return State.WAITING
    for stay in stays:
        if stay.start <= position < stay.stop:
            return State.BACK if stay.is_again else State.LIVE
    return None


def _stays(track: Track) -> dict[int, list[Stay]]:
    found: dict[int, list[Stay]] = defaultdict(list)
    for life in track.lives:
        found[life.storage].append(Stay(life.start, life.stop, life.is_again))
    return found
