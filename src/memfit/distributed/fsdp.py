"""Plans of models that FSDP2 shards: one budget for each rank, divided over the units.

Note [What is counted]
    One real step is measured on all ranks, with every unit keeping nothing for its backward pass and communicating as
    it does in training: shards of parameters and gradients, gathered parameters of the unit that runs and of the
    one that is fetched ahead, whole gradients, what reduce-scatter reads and writes, casts of a mixed precision policy.
    All that is there whatever units keep. What a unit keeps and takes is known from its captured graph; the two are
    put together as in Note [Whole peak] of `plan/regions.py`. The step without a plan is never run.

Note [Gradients of a unit]
    FSDP2 reduces a unit's gradients when they stand in its parameters and autograd goes on to what came before. So
    planned units give their gradients to autograd; nothing is taken out of their backward pass.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from torch import nn

from memfit.api import apply
from memfit.capture.sample import Sample
from memfit.distributed.board import PATIENCE_S
from memfit.distributed.mesh_ranks import MeshRanks
from memfit.distributed.units import check_sharded, find_units, settle
from memfit.errors import InvalidInput, InvalidModel
from memfit.execute.attach import check_unplanned
from memfit.measure.optimizer import OptimizerLike, check_optimizer
from memfit.plan.plan import Plan
from memfit.plan.regions import Stretch
from memfit.recipe import EXACT, Budget, Recipe, without_channels_last
from memfit.regions.find import Regions
from memfit.regions.planner import RegionPlanner
from memfit.regions.whole import baseline_step


def plan_sharded(
    model: nn.Module,
    sample: Any,
    *,
    budget: Budget,
    optimizer: OptimizerLike | None = None,
    allow: Sequence[str] = EXACT,
    backward_from: str = "auto",
    time_limit: float = 20.0,
    patience: float = PATIENCE_S,
) -> Plan:
    """Find the fastest way to train a model sharded by FSDP2 under a budget for each rank; the model is not changed.

    Call it on all ranks, after `fully_shard` on the units and on the model itself, with one rank's share of a batch.
    `budget` is the peak of allocated bytes of one rank: bytes, "6GiB", a fraction of the unplanned peak, or
    "smallest". Keywords are those of `memfit.plan`; `patience` is how many seconds a rank may be without a sign of
    life. All ranks get the same plan; `memfit.apply(plan, model)` applies
    it. Where it cannot be found, all ranks raise the same error.
    """
    recipe = _recipe(budget, optimizer, allow, backward_from, time_limit)
    check_sharded(model)
    return _planned(model, Sample.of(sample), recipe, patience)


def fit_sharded(
    model: nn.Module,
    sample: Any,
    budget: Budget,
    *,
    optimizer: OptimizerLike | None = None,
    allow: Sequence[str] = EXACT,
    backward_from: str = "auto",
    time_limit: float = 20.0,
    patience: float = PATIENCE_S,
) -> nn.Module:
    """Plan and apply: train a model sharded by FSDP2 inside a budget for each rank. `memfit.remove` undoes it.

    Keywords are those of `plan_sharded`; `memfit.plan_of(model)` shows the plan. Units are captured in the first step.
    """
    recipe = _recipe(budget, optimizer, allow, backward_from, time_limit)
    check_sharded(model)
    check_unplanned(model)
    return apply(_planned(model, Sample.of(sample), recipe, patience), model)


def _recipe(
    budget: Budget, optimizer: OptimizerLike | None, allow: Sequence[str], backward_from: str, time_limit: float
) -> Recipe:
    check_optimizer(optimizer)
    if budget is None:
        raise InvalidInput('a sharded model is planned under a budget; give one, for example budget="6GiB"')
    if not time_limit >= 0:
        raise InvalidInput(f"a time limit is a number of seconds, {time_limit!r} was given")
    recipe = Recipe(
        budget=budget,
        optimizer=optimizer,
        allow=(allow,) if isinstance(allow, str) else tuple(allow),
        backward_from=backward_from,
        time_limit_s=time_limit,
    )
    return without_channels_last(recipe)


def _planned(model: nn.Module, sample: Sample, recipe: Recipe, patience_s: float) -> Plan:
    """The same plan on all ranks."""
    settle(model)
    ranks = MeshRanks(model, patience_s=patience_s)
    with ranks.busy():
        return _planned_together(model, sample, recipe, ranks)


def _planned_together(model: nn.Module, sample: Sample, recipe: Recipe, ranks: MeshRanks) -> Plan:
    start = time.monotonic()
    regions = find_units(model, sample, recipe, timed=ranks.is_first)
    ranks.check_equal(_described(regions), what="the graphs of their units")
    if not regions.found:
        raise InvalidModel(f"no unit of this {type(model).__name__} could be captured: {_reasons(regions)}")
    eager, measured = baseline_step(model, sample, recipe, regions.found)
    peak_bytes = max(stretch.live_bytes for stretch in measured)
    stretches = _raised(measured, ranks.largest(peak_bytes) - peak_bytes)

    def make() -> str:
        seconds = time.monotonic() - start
        planner = RegionPlanner(model, sample, recipe, regions, eager, stretches, seconds)
        return planner.plan(recipe).to_json()

    return Plan.from_json(ranks.from_first(make))


def _raised(stretches: Sequence[Stretch], extra_bytes: int) -> list[Stretch]:
    """The same step where a rank needs most: shards are not all of one size."""
    return [dataclasses.replace(each, live_bytes=each.live_bytes + extra_bytes) for each in stretches]


def _described(regions: Regions) -> str:
    return "\n".join(f"{region.name} {region.calls} {region.graph.digest()}" for region in regions.found)


def _reasons(regions: Regions) -> str:
    return "; ".join(f"{path or 'the model itself'}: {reason}" for path, reason in regions.left_eager.items())
