"""A story as the page's script reads it: columns of numbers, and every word once."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memfit.ir import Kind
from memfit.plan.plan import Plan, Treatment
from memfit.report.breakdown import printable
from memfit.report.shades import SHADES, shade_of, slug
from memfit.report.story import Story, Track, Value

_MOST_TILES = 600  # values that are drawn one by one; what is smaller would not be seen
_PHASES = ("forward", "backward", "optimizer")
_TREATMENTS = tuple(Treatment)


class _Words:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def numbered(self, words: Iterable[str]) -> list[int]:
        return [self.numbers.setdefault(word, len(self.numbers)) for word in words]


def data_of(plan: Plan, stories: Sequence[Story], depth: int) -> dict[str, Any]:
    """All that the script draws; `depth` is how many names deep modules are told apart."""
    return {
        "budget": plan.budget_bytes if not plan.regions else None,
        "shades": [{"slug": slug(shade), "label": str(shade)} for shade in SHADES],
        "phases": list(_PHASES),
        "depth": depth,
        "stories": [_story_data(story, plan) for story in stories],
    }


def _story_data(story: Story, plan: Plan) -> dict[str, Any]:
    words = _Words()
    planned = plan.regions[story.name] if story.name else plan
    data = {
        "name": story.name,
        "places": story.place_count,
        "values": _values_data(story.values, words),
        "planned": _track_data(story.planned, words),
        "unplanned": _track_data(story.unplanned, words),
        "tiles": tiles_of(story, planned),
    }
    return data | {"words": list(words.numbers)}


def _values_data(values: Sequence[Value], words: _Words) -> dict[str, list[int]]:
    return {
        "name": words.numbered(value.name for value in values),
        "module": words.numbered(value.module for value in values),
        "shape": words.numbered(f"{value.shape} {value.dtype}" for value in values),
        "shade": [SHADES.index(shade_of(value.kind, is_again=False)) for value in values],
        "again": [SHADES.index(shade_of(value.kind, is_again=True)) for value in values],
        "size": [value.size_bytes for value in values],
    }


def _track_data(track: Track, words: _Words) -> dict[str, Any]:
    moments = track.moments
    return {
        "peak": track.peak_position,
        "place": _steps(track.places),
        "label": words.numbered(moment.label for moment in moments),
        "target": words.numbered(moment.target for moment in moments),
        "module": words.numbered(moment.module for moment in moments),
        "technique": words.numbered(moment.technique for moment in moments),
        "phase": [_PHASES.index(moment.phase) for moment in moments],
        "again": [int(moment.is_again) for moment in moments],
        "workspace": [moment.workspace_bytes for moment in moments],
        "time": [round(moment.time_us) for moment in moments],
        "base": {SHADES.index(shade): size for shade, size in track.base_bytes.items() if size},
        "lives": {
            "value": [life.storage for life in track.lives],
            "start": _steps([life.start for life in track.lives]),
            "length": [life.stop - life.start for life in track.lives],
            "again": [int(life.is_again) for life in track.lives],
        },
    }


def _steps(numbers: Sequence[int]) -> list[int]:
    """What each number is more than the one before it: small where they only rise.

    >>> _steps([3, 4, 4, 9])
    [3, 1, 0, 5]
    """
    return [number - before for before, number in itertools.pairwise([0, *numbers])]


def tiles_of(story: Story, plan: Plan) -> list[list[int]]:
    """The values that the animation shows, in the order of the forward pass, with what the plan does to each.

    Activations that a plan decides about; the smallest are left out where there are very many.
    """
    treatments: Mapping[tuple[str, str], int] = {
        (printable(fate.module), printable(fate.value)): _TREATMENTS.index(fate.treatment) for fate in plan.fates
    }
    order = [life.storage for track in (story.unplanned, story.planned) for life in track.lives]
    made = [
        number
        for number in dict.fromkeys(order)
        if story.values[number].kind is Kind.ACTIVATION and _key(story, number) in treatments
    ]
    biggest = sorted(made, key=lambda number: -story.values[number].size_bytes)[:_MOST_TILES]
    shown = set(biggest)
    return [[number, treatments[_key(story, number)]] for number in made if number in shown]


def _key(story: Story, number: int) -> tuple[str, str]:
    return (story.values[number].module, story.values[number].name)
