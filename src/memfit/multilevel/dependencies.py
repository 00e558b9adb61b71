"""Who uses whose parameters, in which order problems step, and how gradients travel between them.

Note [Routes]
    The loss of an upper problem U may use the solutions of lower ones (`l2u`), and the loss of a lower one may
    use the parameters of upper ones (`u2l`). A change of U reaches U's loss along every path that first goes
    down (`u2l`) and then up (`l2u`) and touches only problems below U. The gradient travels such paths
    backwards: from U's loss down to a lower problem (phase `up`, reversed) and from there up to U again
    (phase `down`, reversed). Gradients that meet at a problem are added before it is differentiated through,
    so a problem is differentiated through at most once in each phase, however many paths lead through it.
    Where the loss of a middle problem uses a lower solution that in turn depends on it, the two answer together if
    their methods solve with the curvature (Note [Answering as a whole]). With other methods the middle problem
    answers as if the lower one stood still, and the lower one's answer comes as a path of its own.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Union

from memfit.errors import InvalidInput

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem

Given = Mapping[Union["Problem", str], Iterable[Union["Problem", str]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leg:
    """Differentiate through one problem: a gradient at its solution becomes gradients at what it depends on."""

    through: "Problem"
    onto: tuple["Problem", ...]
    downwards: bool  # onto problems below it (phase `up`, reversed) or above it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """All legs that bring the gradient of an upper loss home, in order; see Note [Routes]."""

    upper: "Problem"
    legs: tuple[Leg, ...] = ()

    @property
    def sources(self) -> tuple["Problem", ...]:
        """Lower problems whose gradient in the upper loss the legs start from."""
        through = {leg.through for leg in self.legs}
        return tuple(lower for lower in self.upper.lowers if lower in through)


class Dependencies:
    """The checked structure of a multilevel program."""

    def __init__(self, problems: Sequence["Problem"], given: Mapping[str, Given] | None) -> None:
        _check_names(problems)
        self._by_name = {problem.name: problem for problem in problems}
        self.problems = tuple(problems)
        given = given or {}
        unknown = set(given) - {"u2l", "l2u"}
        if unknown:
            raise InvalidInput(f"dependencies have the keys 'u2l' and 'l2u', {sorted(unknown)} was given")
        downwards = self._edges(given.get("u2l", {}))
        upwards = self._edges(given.get("l2u", {}))
        self.used_uppers = {each: [a for a, b in downwards if b is each] for each in problems}  # in its loss
        self.used_lowers = {each: [a for a, b in upwards if b is each] for each in problems}
        self.above = {each: [b for a, b in upwards if a is each] for each in problems}  # step after it
        self.lowest_first = self._ordered([*downwards, *((b, a) for a, b in upwards)])

    def leaves(self) -> list["Problem"]:
        """Problems that wait for nobody."""
        return [problem for problem in self.problems if not self.used_lowers[problem]]

    def route(self, upper: "Problem") -> Route:
        """See Note [Routes]."""
        below = self._below(upper)
        answering = self._answering(upper, below)
        feeding = {each for each in below if each in answering or self._all_below_by_use(each) & answering}
        legs = [
            Leg(through=each, onto=onto, downwards=True)
            for each in reversed(self.lowest_first)
            if each in below and (onto := tuple(lower for lower in self._held_below(each) if lower in feeding))
        ]
        legs += [
            Leg(through=each, onto=onto, downwards=False)
            for each in self.lowest_first
            if each in answering
            and (onto := tuple(other for other in self.used_uppers[each] if other is upper or other in answering))
        ]
        return Route(upper=upper, legs=tuple(_reached(legs, self.used_lowers[upper])))

    def _held_below(self, problem: "Problem") -> list["Problem"]:
        """Used lowers that are not part of the problem's own answer to a change."""
        return [lower for lower in self.used_lowers[problem] if not problem.answers_as_a_whole_with(lower)]

    def _answering(self, upper: "Problem", below: set["Problem"]) -> set["Problem"]:
        """Problems below whose loss uses the upper one, directly or through other uppers between them."""
        found: set[Problem] = set()
        for each in reversed(self.lowest_first):
            if each in below and any(other is upper or other in found for other in self.used_uppers[each]):
                found.add(each)
        return found

    def _below(self, upper: "Problem") -> set["Problem"]:
        found: set[Problem] = set()
        waiting = [upper]
        while waiting:
            current = waiting.pop()
            direct = [*self.used_lowers[current], *(p for p in self.problems if current in self.used_uppers[p])]
            waiting += [problem for problem in direct if problem not in found]
            found.update(direct)
        return found

    def _all_below_by_use(self, problem: "Problem") -> set["Problem"]:
        found: set[Problem] = set()
        waiting = [problem]
        while waiting:
            lowers = self.used_lowers[waiting.pop()]
            waiting += [lower for lower in lowers if lower not in found]
            found.update(lowers)
        return found

    def _edges(self, given: Given) -> list[tuple["Problem", "Problem"]]:
        return [(self._find(key), self._find(value)) for key, values in given.items() for value in values]

    def _find(self, named: Union["Problem", str]) -> "Problem":
        name = named if isinstance(named, str) else getattr(named, "name", repr(named))
        problem = self._by_name.get(name)
        if problem is None or (not isinstance(named, str) and problem is not named):
            raise InvalidInput(
                f"the dependencies name {name!r}, which is not among the problems "
                f"({', '.join(map(repr, self._by_name))}); add it to Engine(problems=...)"
            )
        return problem

    def _ordered(self, upper_and_lower: list[tuple["Problem", "Problem"]]) -> list["Problem"]:
        """From the lowest to the highest; refuses a circle."""
        ordered: list[Problem] = []
        waiting = list(self.problems)
        while waiting:
            free = [p for p in waiting if all(a is not p or b in ordered for a, b in upper_and_lower)]
            if not free:
                circle = " and ".join(repr(problem.name) for problem in waiting)
                raise InvalidInput(
                    f"{circle} are above and below each other at once; in 'u2l' the key is the upper problem, in "
                    "'l2u' the lower one: turn round the entry that closes the circle"
                )
            ordered += free
            waiting = [problem for problem in waiting if problem not in ordered]
        return ordered


def _reached(legs: Iterable[Leg], sources: Iterable["Problem"]) -> Iterator[Leg]:
    """Legs that a gradient arrives at, if it starts at the sources."""
    arrived = set(sources)
    for leg in legs:
        if leg.through in arrived:
            arrived.update(leg.onto)
            yield leg


def _check_names(problems: Sequence["Problem"]) -> None:
    if not problems:
        raise InvalidInput("an engine needs at least one problem, none was given")
    names = [problem.name for problem in problems]
    for name in names:
        if not name.isidentifier():
            raise InvalidInput(
                f"a problem is named {name!r}, which problems cannot be reached by as self.name; rename it"
            )
        if names.count(name) > 1:
            raise InvalidInput(f"two problems are named {name!r}, so neither can be reached by name; rename one")
