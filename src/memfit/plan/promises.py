"""Schedules that a refusal has promised, so that the search for the budget it names begins with them.

Note [Promises of a refusal]
    A refusal names the smallest budget that a plan was found for. A search that has a time limit may not find that plan
    again, on a busy machine for one. So the schedule is kept, by graph, while the process lives.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from memfit.plan.expand import Expansion
from memfit.plan.solve import Planner

_MOST = 64  # the latest

_promised: OrderedDict[Hashable, tuple[Expansion, ...]] = OrderedDict()


def promise(planner: Planner, expansions: Sequence[Expansion]) -> None:
    """Keep schedules for the next planner of the same graph and wishes."""
    key = _key(planner)
    _promised[key] = tuple(expansions)
    _promised.move_to_end(key)
    while len(_promised) > _MOST:
        _promised.popitem(last=False)


def promised(planner: Planner) -> list[Expansion]:
    """Return what was promised of this graph, with the costs of now, without what cannot be run any more."""
    revalued = [planner.expander.revalued(each) for each in _promised.get(_key(planner), ())]
    return [each for each in revalued if each.extra_us < math.inf]


def _key(planner: Planner) -> Hashable:
    problem = planner.problem
    return problem.graph.digest(), planner.kept, planner.dropped, problem.runs_again
