"""What an expansion is made from: the values that should be there at every turn of the backward pass."""

import dataclasses
from collections.abc import Mapping, Sequence

from memfit.plan.expand import Expansion
from memfit.plan.problem import Problem
from memfit.plan.staged import StagedAnswer


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The arguments of `Expander.expand`."""

    wanted: Sequence[int]
    made_early: Mapping[int, int]
    chosen: Mapping[int, int]


def everything_kept(problem: Problem) -> list[int]:
    """By backward turn: what it and later turns read. Nothing is made again."""
    wanted = [0] * len(problem.backward)
    reads = 0
    for place in range(len(wanted) - 1, -1, -1):
        reads |= problem.backward[place].ways[0].needs
        wanted[place] = reads
    return wanted


def choice_of(problem: Problem, expansion: Expansion) -> Choice:
    """The choice that an expansion comes from."""
    live = expansion.live
    early = {place: live[place + 1] & ~live[place] for place in range(len(live) - 1)}
    chosen = {}
    for place, turn in enumerate(problem.backward):
        if len(turn.ways) > 1:
            gone = expansion.backward[place][-1].operation
            chosen[place] = next(number for number, way in enumerate(turn.ways) if way.operation == gone)
    return Choice(list(live), {place: values for place, values in early.items() if values}, chosen)


def with_answer(choice: Choice, stages: Sequence[int], end: int, answer: StagedAnswer) -> Choice:
    """A choice with the turns from the first of some stages up to `end` as a staged program wants them."""
    first = stages[0]
    wanted = list(choice.wanted)
    for start, following, live, made in zip(stages, (*stages[1:], end), answer.live, answer.made, strict=True):
        for place in range(start, following):
            wanted[place] = live | made
        wanted[start] = live
    early = {place: values for place, values in choice.made_early.items() if not first <= place < end}
    early |= {stage - 1: live for stage, live in zip(stages[1:], answer.live[1:], strict=True)}
    if end < len(wanted):
        early[end - 1] = wanted[end]
    chosen = {place: number for place, number in choice.chosen.items() if not first <= place < end}
    return Choice(wanted, early, chosen | dict(answer.chosen))
