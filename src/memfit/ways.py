"""Which ways to run a step are planned where kernels may be compiled, and which of the plans is taken.

Note [Not only compiled]
    As a rule compiled kernels are the faster ones. But a stretch holds all that it reads, and the lean forms of the
    operators inside are gone, so a budget may be out of reach that the model's own operators keep to, or cost more. So
    where there is no plan, or one that is slower than eager, another is made with eager kernels, and the faster is
    taken; for "smallest" the lower one.
"""

import logging
import math
from collections.abc import Callable
from typing import TypeVar

from memfit.errors import InfeasibleBudget, MemfitError, first_line
from memfit.plan.plan import Plan
from memfit.recipe import Recipe, without_channels_last, without_kernels

log = logging.getLogger(__name__)

_AS_FAST = 0.02  # slower than eager: as far as predictions can be believed

Made = TypeVar("Made")


def best_way(recipe: Recipe, make: Callable[[Recipe], Made], plan_of: Callable[[Made], Plan]) -> Made:
    """What `make` makes of the best way to run a recipe, see Note [Not only compiled]."""
    made: list[Made] = []
    refused: list[InfeasibleBudget] = []
    for way in _ways(recipe):
        if made and not _may_beat(way, plan_of(made[-1]), recipe):
            continue
        try:
            made.append(make(way))
        except InfeasibleBudget as error:
            refused.append(error)
        except MemfitError as error:
            if not made:
                raise
            log.warning("another way to run the step was not planned: %s", first_line(error))
        except KeyboardInterrupt:
            if not made:
                raise
            break
    if not made:
        raise min(refused, key=lambda error: error.smallest_bytes or math.inf)
    best = min(made, key=lambda each: _rank(plan_of(each), recipe))
    if recipe.compiles and "inductor" not in plan_of(best).allow:
        log.info("eager kernels are taken: under this budget they are predicted to do better than compiled ones")
    return best


def _ways(recipe: Recipe) -> list[Recipe]:
    """In the order in which they are tried; other layouts only where there is no plan in the first."""
    ways = [recipe]
    if recipe.channels_last:
        ways.append(without_channels_last(recipe))
    if recipe.compiles and recipe.budget is not None:
        ways.append(without_kernels(recipe))
    return ways


def _may_beat(way: Recipe, plan: Plan, recipe: Recipe) -> bool:
    """Whether a way is worth planning beside a plan that was made."""
    if way.compiles or not recipe.compiles or not plan.times_measured or plan.was_interrupted:
        return False
    return recipe.budget == "smallest" or plan.slowdown > _AS_FAST


def _rank(plan: Plan, recipe: Recipe) -> tuple[float, float]:
    return (plan.peak_bytes, plan.slowdown) if recipe.budget == "smallest" else (plan.slowdown, plan.peak_bytes)
