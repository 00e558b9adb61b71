"""The staged program: which values live when, as a linear program with binary variables.

The backward pass is cut into stages at some of its turns. For every value v and stage p,
s[v,p] says that v lives when stage p starts, and for every way o to make values, r[o,p] says
that it is run in stage p:

    a turn of stage p needs v            s[v,p] + sum of r[o,p] over ways that make v >= 1
    running o again needs its inputs u   r[o,p] <= s[u,p] + sum of r[.,p] over ways that make u
    what lives was there or was made     s[v,p+1] <= s[v,p] + sum of r[o,p]
    the first turn of every stage fits   kept values + what it needs + outputs + workspace <= budget

The cost is the time of all runs. Every schedule in the order of Note [Order] satisfies these
rows, because each memory row speaks of one exact moment; so the relaxation bounds every
schedule from below. A solution is an exact schedule only where the stages are fine enough:
`plan/solve.py` cuts them where the walk finds too much.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from memfit.plan.expand import Expansion
from memfit.plan.linear import Answer, LinearProgram
from memfit.plan.links import Link, Links
from memfit.plan.problem import Turn, numbers
from memfit.plan.stages import Stages, Window

_UNIT = float(2**20)  # bytes in the units of memory rows: solvers like numbers near 1


@dataclasses.dataclass(frozen=True, slots=True)
class StagedAnswer:
    """Which values live at the start of each stage and which are made in it."""

    live: tuple[int, ...]
    made: tuple[int, ...]
    extra_us: float
    chosen: Mapping[int, int]  # by turn that has several ways: the number of the way it goes


class StagedProgram:
    """One linear program for given stages, budget and margins; of the whole backward pass or of a window of it."""

    def __init__(
        self,
        links: Links,
        *,
        budget_bytes: int,
        stages: Sequence[int],
        forward_rows: Sequence[int] = (),
        run_rows: Sequence[tuple[int, int]] = (),
        margins: Mapping[int, int] | None = None,
        kept: int = 0,
        dropped: int = 0,
        horizon: int | None = None,
        window: Window | None = None,
        start: Expansion | None = None,
    ) -> None:
        """`start` is a schedule that fits: the search begins there, and what it runs is never beyond the horizon."""
        self._links = links
        self._problem = links.problem
        self._window = window or Window(len(links.problem.backward), None, 0)
        self._budget_bytes = budget_bytes
        self._stages = Stages(links, sorted(stages), self._window)
        self._margins = margins or {}
        self._horizon = horizon
        self._start = start
        self._kept, self._dropped = kept, dropped
        self.program = LinearProgram()
        self._live: list[dict[int, int]] = []  # by stage: value to variable
        self._runs: list[list[tuple[Link, int]]] = []
        self._makes: list[dict[int, list[int]]] = []  # by stage: value to the variables of runs that make it
        self._chosen: dict[tuple[int, int], int] = {}  # (turn, number of way) to variable
        self._held: list[dict[int, int]] = []  # by stage: value to the variable that says it lives through it
        self._any: dict[int, list[int]] = {}  # a variable to those it is 1 with
        self._both: dict[int, tuple[int, int]] = {}  # a variable to the two it is 1 with
        self._build()
        for turn in forward_rows:
            self._forward_row(turn)
        for place, operation in run_rows:
            self._run_row(place, operation)

    @property
    def size(self) -> tuple[int, int]:
        return self.program.size

    def solve(
        self,
        *,
        time_limit_s: float,
        gap: float = 0.0,
        is_over: Callable[[float], bool] | None = None,
        free: int | None = None,
    ) -> tuple[StagedAnswer | None, float]:
        """The best schedule found and the bound on all of them, in microseconds.

        With `free` only what concerns these values is decided, and all else is as in the schedule to start from.
        """
        point = None if self._start is None else self._point(self._start)
        fixed = {} if point is None or free is None else self._fixed(point, free)
        answer = self.program.solve(time_limit_s=time_limit_s, gap=gap, start=point, is_over=is_over, fixed=fixed)
        return (None if answer.values is None else self._read(answer)), answer.bound

    def _point(self, expansion: Expansion) -> list[float]:
        """A schedule as values of the variables."""
        point = [0.0] * self.program.size[0]
        for required in self._live[len(self._stages) :]:
            for variable in required.values():
                point[variable] = 1.0
        for stage in range(len(self._stages)):
            ran = self._stages.ran(expansion, stage)
            for number, variable in self._live[stage].items():
                point[variable] = float(expansion.live[self._stages.first[stage]] >> number & 1)
            for link, variable in self._runs[stage]:
                point[variable] = float(link.own in ran)
        for stage in range(len(self._stages)):  # what is held goes by what lives in the stage after it
            for number, variable in self._held[stage].items():
                wanted = point[self._after(stage)[number]]
                made = max((point[each] for each in self._makes[stage].get(number, ())), default=0.0)
                point[variable] = max(0.0, wanted - made)
        for (place, index), variable in self._chosen.items():
            way = self._problem.backward[place].ways[index]
            point[variable] = float(expansion.backward[place][-1].operation == way.operation)
        for total, variables in self._any.items():
            point[total] = max(point[each] for each in variables)
        for both, (one, other) in self._both.items():
            point[both] = min(point[one], point[other])
        return point

    def _fixed(self, point: Sequence[float], free: int) -> dict[int, float]:
        """Variables of values that are not free, and of runs that make none that is."""
        fixed: dict[int, float] = {}
        for live in self._live:
            fixed |= {variable: point[variable] for number, variable in live.items() if not free >> number & 1}
        for runs in self._runs:
            fixed |= {variable: point[variable] for link, variable in runs if not link.makes & free}
        return fixed

    def _build(self) -> None:
        useful = self._stages.useful()
        for stage in range(len(self._stages)):
            self._add_variables(stage, useful[stage])
        if self._window.after:
            self._live.append(self._required(self._window.after & self._links.values))
        for stage in range(len(self._stages)):
            self._need_rows(stage)
            self._input_rows(stage)
            self._carry_rows(stage)
            self._memory_rows(stage)
        for stage in range(len(self._live) - 1 if self._horizon is not None else 0):
            self._fresh_rows(stage)

    def _required(self, values: int) -> dict[int, int]:
        """Variables of values that must be there."""
        required = {number: self.program.variable() for number in numbers(values)}
        for variable in required.values():
            self.program.at_least({variable: 1.0}, 1.0)
        return required

    def _after(self, stage: int) -> dict[int, int]:
        """The variables of what lives when a stage is over."""
        return self._live[stage + 1] if stage + 1 < len(self._live) else {}

    def _add_variables(self, stage: int, useful: int) -> None:
        program, problem = self.program, self._problem
        reads = self._window.after
        for turn in problem.backward[self._stages.first[stage] : self._window.end]:
            reads |= turn.ways[0].needs
        begins = stage == 0 and self._window.before is None
        possible = useful & self._links.values
        if stage == 0 and self._window.before is not None:
            possible &= self._window.before
        live = {}
        for number in numbers(possible):
            packer = problem.packers.get(number)
            kept_us = packer.time_us if packer else problem.kept_from_us.get(number, 0.0)
            live[number] = program.variable(kept_us if begins else 0.0)
            if (self._kept & reads) >> number & 1:
                program.at_least({live[number]: 1.0}, 1.0)
            if self._dropped >> number & 1 and begins:
                program.at_most({live[number]: 1.0}, 0.0)
        self._live.append(live)
        runs = [
            (link, program.variable(link.fresh_us if self._is_read_in(stage, link) else link.time_us))
            for link in self._stages.runnable(stage, self._horizon, self._start)
        ]
        makes: dict[int, list[int]] = {}
        for link, variable in runs:
            for number in numbers(link.makes):
                makes.setdefault(number, []).append(variable)
        self._runs.append(runs)
        self._makes.append(makes)

    def _is_read_in(self, stage: int, link: Link) -> bool:
        """Whether a turn of the stage reads what a run of it would write over; a bound need not know."""
        return self._horizon is not None and bool(link.overwrites & self._stages.reads(self._stages.turns(stage)))

    def _there(self, stage: int, number: int) -> dict[int, float]:
        """Terms that add up to at least one if a value is there in a stage."""
        terms = dict.fromkeys(self._makes[stage].get(number, ()), 1.0)
        if number in self._live[stage]:
            terms[self._live[stage][number]] = 1.0
        return terms

    def _need_rows(self, stage: int) -> None:
        program = self.program
        always = 0
        for place in self._stages.turns(stage):
            turn = self._problem.backward[place]
            if len(turn.ways) == 1:
                always |= turn.ways[0].needs
                continue
            chosen = self._choose(place, turn)
            for way, variable in zip(turn.ways, chosen, strict=True):
                for number in numbers(way.needs):
                    program.at_least(self._there(stage, number) | {variable: -1.0}, 0.0)
        for number in numbers(always):
            program.at_least(self._there(stage, number), 1.0)

    def _choose(self, place: int, turn: Turn) -> list[int]:
        """One variable a way of a turn, of which exactly one is 1; a faster way than the model's own has a gain."""
        chosen = [self.program.variable(way.time_us - turn.ways[0].time_us) for way in turn.ways]
        self.program.at_least(dict.fromkeys(chosen, 1.0), 1.0)
        self.program.at_most(dict.fromkeys(chosen, 1.0), 1.0)
        self._chosen |= {(place, index): variable for index, variable in enumerate(chosen)}
        return chosen

    def _input_rows(self, stage: int) -> None:
        for link, variable in self._runs[stage]:
            for number in numbers(link.needs & self._links.values):
                self.program.at_least(self._there(stage, number) | {variable: -1.0}, 0.0)

    def _carry_rows(self, stage: int) -> None:
        for number, variable in self._after(stage).items():
            self.program.at_least(self._there(stage, number) | {variable: -1.0}, 0.0)

    def _fresh_rows(self, stage: int) -> None:
        """A run that would write over what lives on after the stage takes new memory instead."""
        for link, run in self._runs[stage]:
            for number in numbers(link.overwrites):
                lives_on = self._after(stage).get(number)
                if lives_on is not None and link.fresh_us > link.time_us and not self._is_read_in(stage, link):
                    fresh = self.program.variable(link.fresh_us - link.time_us, binary=False)
                    self.program.at_least({fresh: 1.0, run: -1.0, lives_on: -1.0}, -1.0)
                    self._both[fresh] = (run, lives_on)

    def _memory_rows(self, stage: int) -> None:
        """The start of a stage, and the run of its first turn."""
        place = self._stages.first[stage]
        turn = self._problem.backward[place]
        room = self._budget_bytes - self._margins.get(place, 0)
        sizes = self._problem.sizes
        start = {variable: sizes[number] / _UNIT for number, variable in self._live[stage].items()}
        before_bytes = turn.before_bytes if place else max(turn.before_bytes, self._problem.loss_bytes)
        self.program.at_most(start, (room - before_bytes) / _UNIT)
        workspace_bytes = min(way.workspace_bytes for way in turn.ways)
        needed = self._needed_by_all(turn)
        read_later = self._read_by_others(stage)
        fixed = turn.during_bytes + workspace_bytes + self._problem.size_of(needed | read_later)
        terms: dict[int, float] = {}
        for number in numbers(read_later & ~needed):  # unless it is made in the stage, after its first turn
            for variable in self._makes[stage].get(number, ()):
                terms[variable] = terms.get(variable, 0.0) - sizes[number] / _UNIT
        held = self._hold(stage)
        if len(self._stages.turns(stage)) == 1 and held:  # all runs of such a stage come before its only turn
            held = self._after(stage)
        counted = needed | read_later
        for number, variables in self._needed_by_some(place, turn, counted).items():
            if number in held:
                variables.append(held[number])
            terms[self._any_of(variables)] = sizes[number] / _UNIT
            counted |= 1 << number
        for index, way in enumerate(turn.ways if len(turn.ways) > 1 else ()):
            terms[self._chosen[place, index]] = (way.workspace_bytes - workspace_bytes) / _UNIT
        for number, variable in held.items():
            if not counted >> number & 1:
                terms[variable] = sizes[number] / _UNIT
        self.program.at_most(terms, (room - fixed) / _UNIT)

    def _needed_by_all(self, turn: Turn) -> int:
        """What a turn reads whichever way it goes; what it overwrites is its output's memory."""
        needed = turn.ways[0].needs
        for way in turn.ways:
            needed &= way.needs
        return needed & ~turn.ways[0].overwrites if len(turn.ways) == 1 else needed

    def _read_by_others(self, stage: int) -> int:
        """What the later turns of a stage read for certain."""
        reads = 0
        for later in self._stages.turns(stage)[1:]:
            ways = self._problem.backward[later].ways
            reads |= ways[0].needs if len(ways) == 1 else 0
        return reads

    def _needed_by_some(self, place: int, turn: Turn, counted: int) -> dict[int, list[int]]:
        """By value that only some ways of a turn read: the variables of those ways."""
        needing: dict[int, list[int]] = {}
        for index, way in enumerate(turn.ways if len(turn.ways) > 1 else ()):
            for number in numbers(way.needs & ~counted):
                needing.setdefault(number, []).append(self._chosen[place, index])
        return needing

    def _any_of(self, variables: list[int]) -> int:
        """A variable that is 1 if one of others is."""
        total = self.program.variable(binary=False)
        for variable in variables:
            self.program.at_least({total: 1.0, variable: -1.0}, 0.0)
        self._any[total] = variables
        return total

    def _hold(self, stage: int) -> dict[int, int]:
        """Variables that say a value lives through a whole stage: wanted after it and not made in it."""
        held: dict[int, int] = {}
        after = self._after(stage)
        for number, variable in after.items():
            held[number] = self.program.variable(binary=False)
            makes = dict.fromkeys(self._makes[stage].get(number, ()), 1.0)
            self.program.at_least({held[number]: 1.0, variable: -1.0, **makes}, 0.0)
        self._held.append(held)
        return held

    def _run_row(self, place: int, operation: int) -> None:
        """What a run before the turn at `place` finds, if the turn is a stage by itself.

        Runs go in the order of the forward pass: earlier values that are wanted afterwards are there
        already, later ones only if they lived through.
        """
        stage = self._stages.first.index(place)
        problem, sizes = self._problem, self._problem.sizes
        way = problem.way(operation)
        found = [variable for link, variable in self._runs[stage] if operation in link.operations]
        if not found:
            return
        turn = problem.backward[place]
        there = way.needs | way.makes
        fixed = turn.before_bytes + way.workspace_bytes + problem.size_of(there & ~way.overwrites)
        terms: dict[int, float] = {}
        own = turn.ways[0].needs if len(turn.ways) == 1 else 0
        for number in numbers(own & ~there):
            fixed += sizes[number]
            if problem.rank_of[number] > way.rank:
                for variable in self._makes[stage].get(number, ()):
                    terms[variable] = terms.get(variable, 0.0) - sizes[number] / _UNIT
        after = self._after(stage)
        for number, variable in after.items():
            if (there | own) >> number & 1:
                continue
            chosen = variable if problem.rank_of[number] < way.rank else self._held[stage][number]
            terms[chosen] = terms.get(chosen, 0.0) + sizes[number] / _UNIT
        room = self._budget_bytes - self._margins.get(place, 0)
        slack = max(0.0, fixed + sum(sizes[number] for number in after) - room) / _UNIT
        for variable in found:
            terms[variable] = terms.get(variable, 0.0) + slack
            break
        self.program.at_most(terms, (room - fixed) / _UNIT + slack)

    def _forward_row(self, place: int) -> None:
        """What a forward turn finds: values it and later turns read, and those that are kept."""
        problem = self._problem
        turn = problem.forward[place]
        room = self._budget_bytes - turn.during_bytes - turn.ways[0].workspace_bytes
        terms: dict[int, float] = {}
        for number, (made, read) in enumerate(zip(problem.first_made, problem.last_read, strict=True)):
            if made > place:
                continue
            if number in problem.packers:
                packing = problem.packers[number].workspace_bytes if made == place else 0
                if number in self._live[0]:
                    terms[self._live[0][number]] = (problem.sizes[number] + packing) / _UNIT
            elif read >= place:
                room -= problem.sizes[number]
            elif number in self._live[0]:
                terms[self._live[0][number]] = problem.sizes[number] / _UNIT
        taken = turn.ways[0].overwrites
        for number in numbers(taken):
            if problem.last_read[number] == place and number in self._live[0]:
                room += problem.sizes[number]
                terms[self._live[0][number]] = problem.sizes[number] / _UNIT
            elif problem.last_read[number] == place:
                room += problem.sizes[number]
        self.program.at_most(terms, room / _UNIT)

    def _read(self, answer: Answer) -> StagedAnswer:
        assert answer.values is not None
        values = answer.values
        starts = self._live[: len(self._stages)]
        live = [sum(1 << n for n, variable in each.items() if values[variable] > 0.5) for each in starts]
        made = []
        for runs in self._runs:
            total = 0
            for link, variable in runs:
                if values[variable] > 0.5:
                    total |= link.makes
            made.append(total)
        chosen = {place: index for (place, index), variable in self._chosen.items() if values[variable] > 0.5}
        return StagedAnswer(tuple(live), tuple(made), answer.objective, chosen)
