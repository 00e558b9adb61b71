"""Which ways to run a step are planned where kernels may be compiled, and which of the plans is taken.

Note [Not only compiled]
    As a rule compiled kernels are the faster ones. But a stretch holds all that it reads, and the lean forms of the
    operators inside are gone, so a budget may be out of reach that the model's own operators keep to, or cost more. So
    where there is no plan, or one that is slower than eager, another is made with eager kernels, and the faster is
    taken; for "smallest" the lower one. Where predictions are so near each other that a busy machine may have turned
    them round, `memfit.fit` runs a few steps each way; not where compiled kernels stand for so little of the step, such
    as what is around one large recurrent operator, that they make no difference, and not where steps are slow.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from memfit.errors import InfeasibleBudget, MemfitError, first_line
from memfit.ops.stretch import PREFIX
from memfit.plan.plan import Plan
from memfit.recipe import Recipe, without_channels_last, without_kernels

log = logging.getLogger(__name__)

_AS_FAST = 0.02  # slower than eager: as far as predictions can be believed
_UNSURE = 0.15  # of the step: that far apart two predictions may still be the wrong way round
_MATTERS = 0.05  # of the step: where compiled kernels stand for less, they make no difference
_LONGEST_STEP_S = 5.0  # of which several are run

Made = TypeVar("Made")


def best_way(
    recipe: Recipe,
    make: Callable[[Recipe], Made],
    plan_of: Callable[[Made], Plan],
    seconds_of: Callable[[Sequence[Made]], Sequence[float] | None] = lambda _: None,
) -> Made:
    """What `make` makes of the best way to run a recipe, see Note [Not only compiled].

    `seconds_of` runs steps and tells how long they take, or None if it cannot; without it predictions decide.
    """
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
    best = _fastest(made, plan_of, seconds_of, recipe)
    if recipe.compiles and "inductor" not in plan_of(best).allow:
        log.info("eager kernels are taken: under this budget they do better than compiled ones")
    return best


def _fastest(
    made: Sequence[Made],
    plan_of: Callable[[Made], Plan],
    seconds_of: Callable[[Sequence[Made]], Sequence[float] | None],
    recipe: Recipe,
) -> Made:
    seconds = None
    with contextlib.suppress(KeyboardInterrupt):  # the plans are there
        seconds = seconds_of(made) if _is_unsure([plan_of(each) for each in made], recipe) else None
    if seconds is None:
        return min(made, key=lambda each: _rank(plan_of(each), recipe))
    log.info("steps of the ways to run it take %s s", " and ".join(f"{each:.3f}" for each in seconds))
    return made[min(range(len(made)), key=lambda place: seconds[place])]


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


def _is_unsure(plans: Sequence[Plan], recipe: Recipe) -> bool:
    """Whether it takes steps to know which of the plans is the fastest."""
    if len(plans) < 2 or recipe.budget == "smallest":
        return False
    if any(plan.was_interrupted or not plan.times_measured for plan in plans):
        return False
    slowdowns = [plan.slowdown for plan in plans]
    is_close = max(slowdowns) - min(slowdowns) < _UNSURE
    return (
        is_close
        and any(_compiled_share(plan) > _MATTERS for plan in plans)
        and all(plan.step_us < _LONGEST_STEP_S * 1e6 for plan in plans)
    )


def _compiled_share(plan: Plan) -> float:
    """What compiled kernels stand for, of the unplanned step's time."""
    if plan.step is None or not plan.step_us:
        return 0.0
    operations = plan.step.graph.operations
    own_us = [plan.step.time_us[place] for place, each in enumerate(operations) if not each.target.startswith(PREFIX)]
    return 0.0 if len(own_us) == len(operations) else 1 - sum(own_us) / plan.step_us


def _rank(plan: Plan, recipe: Recipe) -> tuple[float, float]:
    return (plan.peak_bytes, plan.slowdown) if recipe.budget == "smallest" else (plan.slowdown, plan.peak_bytes)
