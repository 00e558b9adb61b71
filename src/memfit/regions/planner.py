"""Plans of a model in regions, at any budget.

Note [Programs of a region]
    What is best for the whole step is decided by two figures of a region's program: what it keeps between its passes,
    and what its passes take while they run. So programs are searched for on a grid of both. The second is the
    planner's own budget. The first is a workspace that the last operation of the forward pass is said to need:
    what is kept has to live beside it.
"""

import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memfit.capture.sample import Sample
from memfit.describe import describe_sample, device_of, is_fake, model_digest
from memfit.errors import CaptureError, InfeasibleBudget
from memfit.ir import Phase, Program
from memfit.measure.optimizer import optimizer_name
from memfit.measure.peak import held_bytes
from memfit.pipeline import make_planner, write_plan
from memfit.plan.expand import Expansion, program_of
from memfit.plan.plan import Fate, Plan
from memfit.plan.promises import promise, promised
from memfit.plan.regions import Choice, Option, Stretch, choose, smallest, whole_peak_bytes, without_worse
from memfit.plan.simulate import simulate
from memfit.plan.solve import Solution
from memfit.prepare import Prepared
from memfit.recipe import LOWERING, Recipe, budget_bytes
from memfit.regions.find import KEEPS_LITTLE, Kind, Region, Regions, find_regions, region_recipe, regions_digest
from memfit.regions.fullest import fullest_seed
from memfit.regions.whole import EagerStep, eager_footprint, eager_step, limit_of, region_footprint, stretches_of
from memfit.shortage import Shortage

_LEAST_SHARE = 0.002  # of the activations of the step: what a region keeps at least
_PEAK_SHARES = (1.0, 0.5, 0.25)  # of what a region's passes take above the smallest program that was found
_KEPT_SHARES = (0.0, 0.45, 0.2, 0.7, 0.1, 1.0)  # of what the unplanned program keeps; the most telling first
_SHORTEST_SEARCH_S = 0.1
_MOST_PROMISES = 3  # rounds, until the budget that a refusal names is one that is planned for
_TOLERANCE = 0.01  # of the budget: what a captured step may need more than the eager one


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """A program of a kind of regions."""

    program: Program
    solution: Solution


class RegionPlanner:
    """Plans of one model and sample; what is measured and searched for once serves every budget."""

    def __init__(
        self,
        model: nn.Module,
        sample: Sample,
        recipe: Recipe,
        regions: Regions,
        eager: EagerStep,
        stretches: Sequence[Stretch],
        seconds: float,
    ) -> None:
        start = time.monotonic()
        self._model, self._sample, self._recipe = model, sample, recipe
        self._regions, self._left_eager = regions.found, regions.left_eager
        self._eager = eager
        self._calls = [region.calls for region in self._regions]
        self._step_us = eager.step_us or _operators_us(self._regions)
        self._stretches = stretches
        self._programs = _programs(self._regions, recipe)
        found = [self._programs[id(region.kind)] for region in self._regions]
        options = [_options(region, each) for region, each in zip(self._regions, found, strict=True)]
        kept = [[0, *(each for each in without_worse(one) if each)] for one in options]
        self._options = [[one[each] for each in which] for one, which in zip(options, kept, strict=True)]
        self._found = [[one[each] for each in which] for one, which in zip(found, kept, strict=True)]
        self._seconds = seconds + time.monotonic() - start

    @property
    def unplanned_peak_bytes(self) -> int:
        return self._predicted_peak_bytes() if self._eager.peak_bytes is None else self._eager.peak_bytes

    @property
    def persistent_bytes(self) -> int:
        return self._eager.persistent_bytes

    def plan(self, recipe: Recipe) -> Plan:
        """The fastest plan under the recipe's budget. Raises InfeasibleBudget if there is none."""
        start = time.monotonic()
        lowest = smallest(self._options, self._stretches, time_limit_s=recipe.time_limit_s)
        lowest_bytes = self._peak_bytes(lowest)
        limit = lowest_bytes if recipe.budget == "smallest" else self.limit_bytes(recipe)
        choice = self._unplanned_if_it_fits(limit) or choose(
            self._options, self._calls, self._stretches, limit, time_limit_s=recipe.time_limit_s
        )
        if choice is None and lowest_bytes <= limit:
            choice = lowest
        if choice is None:
            raise self._infeasible(limit, lowest, recipe)
        return self._written(choice, limit, lowest_bytes, recipe, self._seconds + time.monotonic() - start)

    def has_plan(self, recipe: Recipe) -> bool:
        """Return whether there is a plan under the recipe's budget."""
        try:
            self.plan(recipe)
        except InfeasibleBudget:
            return False
        return True

    def limit_bytes(self, recipe: Recipe) -> int:
        """Return a budget in bytes."""
        return budget_bytes(recipe.budget, self.unplanned_peak_bytes)

    def _predicted_peak_bytes(self) -> int:
        """Of the eager step, where it was not run."""
        footprints = [eager_footprint(region, region.marked.surroundings()) for region in self._regions]
        options = [[Option(footprint=each, extra_us=0.0)] for each in footprints]
        return whole_peak_bytes(options, self._stretches, (0,) * len(options))

    def _unplanned_if_it_fits(self, limit: int) -> Choice | None:
        unplanned: Choice = (0,) * len(self._regions)
        fits = self.unplanned_peak_bytes <= limit and self._peak_bytes(unplanned) <= limit * (1 + _TOLERANCE)
        return unplanned if fits else None

    def _peak_bytes(self, choice: Choice) -> int:
        return whole_peak_bytes(self._options, self._stretches, choice)

    def _extra_us(self, choice: Choice) -> float:
        return sum(self._calls[region] * self._options[region][number].extra_us for region, number in enumerate(choice))

    def _infeasible(self, limit: int, lowest: Choice, recipe: Recipe) -> InfeasibleBudget:
        lowest_bytes = self._peak_bytes(lowest)
        self._promise(lowest)
        eager, model_bytes = self._eager, held_bytes([self._model])
        always = {
            "parameters and buffers": model_bytes,
            "optimizer state": eager.optimizer.state_bytes - recipe.external_bytes,
            "what stays beside the step": recipe.external_bytes,
            "batch": max(0, eager.resident_bytes - model_bytes),
        }
        return Shortage(
            limit_bytes=limit,
            smallest_bytes=lowest_bytes,
            slowdown=self._extra_us(lowest) / self._step_us,
            always=always,
            at_end={"gradients": max(0, eager.persistent_bytes - sum(always.values()))},
            floor_bytes=eager.persistent_bytes,
            operation=f"a step of {len(self._regions)} regions, whose rest is left eager,",
            on_top_bytes=max(0, lowest_bytes - sum(always.values())),
            not_allowed=[each for each in LOWERING if each not in recipe.allow],
        ).error()

    def _promise(self, choice: Choice) -> None:
        """See Note [Promises of a refusal] in `plan/promises.py`."""
        planners = {id(region.kind): region.kind.planner for region in self._regions}
        chosen: dict[int, list[Expansion]] = defaultdict(list)
        for index, region in enumerate(self._regions):
            chosen[id(region.kind)].append(self._found[index][choice[index]].solution.expansion)
        for kind, expansions in chosen.items():
            promise(planners[kind], expansions)

    def _written(self, choice: Choice, limit: int, lowest_bytes: int, recipe: Recipe, seconds: float) -> Plan:
        plans = {
            region.name: _region_plan(region, self._found[index][choice[index]], recipe)
            for index, region in enumerate(self._regions)
        }
        digests = {name: plan.program.graph_digest for name, plan in plans.items()}
        return Plan(
            model=type(self._model).__name__,
            model_digest=model_digest(self._model),
            sample=describe_sample(self._sample),
            torch_version=torch.__version__,
            device=device_of(self._model),
            optimizer=None if recipe.optimizer is None else optimizer_name(recipe.optimizer),
            allow=recipe.allow,
            rewrites=tuple(dict.fromkeys(each for plan in plans.values() for each in plan.rewrites)),
            outputs=recipe.outputs,
            backward_from=recipe.backward_from,
            budget_bytes=limit,
            peak_bytes=self._peak_bytes(choice),
            unplanned_peak_bytes=self.unplanned_peak_bytes,
            persistent_bytes=self.persistent_bytes,
            optimizer_state_bytes=self._eager.optimizer.state_bytes,
            external_bytes=recipe.external_bytes,
            floor_bytes=lowest_bytes,
            floor_operation="the smallest plan found for these regions",
            step_us=self._step_us,
            extra_us=self._extra_us(choice),
            bound_us=min(0.0, self._extra_us(choice)),
            times_measured=all(plan.times_measured for plan in plans.values()),
            plan_seconds=seconds,
            log=(f"{len(plans)} regions of {len(self._programs)} kinds",),
            fates=tuple(_whole_fates(plans)),
            program=Program(graph_digest=regions_digest(digests), forward=(), backward=()),
            regions=plans,
            left_eager=self._left_eager,
        )


def plan_by_regions(model: nn.Module, sample: Sample, recipe: Recipe, error: CaptureError) -> Plan:
    """Plan the parts of a model, see `make_region_planner`; the budget that a refusal names was planned for.

    What a step takes around regions is measured within the budget, and may be another figure within another one.
    """
    planner = make_region_planner(model, sample, recipe, error)
    asked = recipe if recipe.budget == "smallest" else dataclasses.replace(recipe, budget=planner.limit_bytes(recipe))
    for _ in range(_MOST_PROMISES):
        try:
            return planner.plan(asked)
        except InfeasibleBudget as refusal:
            named = dataclasses.replace(recipe, budget=refusal.smallest_bytes)
            planner = make_region_planner(model, sample, named, error)
            if planner.has_plan(named):
                raise
    return planner.plan(asked)


def make_region_planner(model: nn.Module, sample: Sample, recipe: Recipe, error: CaptureError) -> RegionPlanner:
    """Find the regions of a model that could not be captured whole, as `error` says, and measure its step.

    That error is raised where there is nothing to be done: no memory to run in, no budget, no part that can
    be captured, or wishes that only a captured model can be given.
    """
    start = time.monotonic()
    if not could_be_in_regions(model, sample, recipe):
        raise _without_what_asks_for_whole(error, model, sample, recipe)
    recipe = dataclasses.replace(recipe, seed=fullest_seed(model, sample))
    try:
        eager = eager_step(model, sample, recipe)
    except CaptureError as reason:
        raise type(error)(
            f"{error}. Nor can parts of it be: {reason}", module=error.module, source=error.source
        ) from reason
    assert eager.peak_bytes is not None
    least_bytes = int(_LEAST_SHARE * (eager.peak_bytes - eager.resident_bytes))
    limit_bytes = limit_of(eager, recipe, device_of(model))
    spills = limit_bytes is not None
    most_bytes = eager.peak_bytes - eager.optimizer.state_bytes if limit_bytes is None else limit_bytes
    options: dict[str, Any] = {"least_bytes": max(1, least_bytes), "limit_bytes": most_bytes, "spills": spills}
    regions = find_regions(model, sample, recipe, error, **options)
    if not regions.found:
        raise _without_regions(error, regions.left_eager, eager.peak_bytes)
    stretches = stretches_of(model, sample, recipe, regions.found, eager.optimizer, spills=spills)
    return RegionPlanner(model, sample, recipe, regions, eager, stretches, time.monotonic() - start)


def _without_regions(error: CaptureError, left_eager: Mapping[str, str], unplanned_bytes: int) -> CaptureError:
    """Say of a part why it cannot be planned by itself: of the first that is refused, rather than one that is small."""
    parts = [(name, reason) for name, reason in left_eager.items() if name]
    name, reason = min(parts, key=lambda part: part[1].startswith(KEEPS_LITTLE), default=("", ""))
    words = f"{error}. No part of it can be planned by itself either; {name!r}: {reason}" if name else str(error)
    return type(error)(words, module=error.module, source=error.source, unplanned_bytes=unplanned_bytes)


def could_be_in_regions(model: nn.Module, sample: Sample, recipe: Recipe) -> bool:
    """Whether a step can be run and measured here, and all that is asked for can be done region by region."""
    return _is_run_under_a_budget(model, sample, recipe) and not _asked_of_whole(recipe)


def _is_run_under_a_budget(model: nn.Module, sample: Sample, recipe: Recipe) -> bool:
    return not is_fake(model, sample) and model.training and recipe.budget is not None


def _asked_of_whole(recipe: Recipe) -> list[str]:
    """Name what is asked for that only a model captured whole can be given."""
    asked = {
        "recompute=": bool(recipe.recompute),
        "keep=": bool(recipe.keep),
        f"outputs={recipe.outputs!r}": recipe.outputs != "all",
        "device=": recipe.device is not None,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def _without_what_asks_for_whole(error: CaptureError, model: nn.Module, sample: Sample, recipe: Recipe) -> CaptureError:
    """Say what to leave out, if that is all that keeps a model from being planned region by region."""
    asked = _asked_of_whole(recipe)
    if not asked or not _is_run_under_a_budget(model, sample, recipe):
        return error
    words = f"{error}. Parts of it may be planned by themselves if {' and '.join(asked)} is left out"
    return type(error)(words, module=error.module, source=error.source)


def _operators_us(regions: Sequence[Region]) -> float:
    """Return what operators of all regions take, see Note [Inside the budget] in `regions/whole.py`."""
    return sum(region.calls * region.kind.planner.problem.own_time_us for region in regions)


def _programs(regions: Sequence[Region], recipe: Recipe) -> dict[int, list[_Found]]:
    """By kind of region: its programs, the unplanned first, see Note [Programs of a region]."""
    kinds = {id(region.kind): region for region in regions}
    time_limit_s = recipe.time_limit_s / len(kinds)
    programs = {}
    for key, region in kinds.items():
        found: dict[Program, _Found] = {}
        for solution in _solutions(region, recipe, time_limit_s):
            program = program_of(region.kind.planner.problem, solution.expansion)
            found.setdefault(program, _Found(program=program, solution=solution))
        programs[key] = list(found.values())
    return programs


def _solutions(region: Region, recipe: Recipe, time_limit_s: float) -> Iterator[Solution]:
    kind = region.kind
    end = time.monotonic() + time_limit_s
    yield kind.planner.unplanned_solution()
    lowest = kind.planner.smallest(time_limit_s=time_limit_s / 4)
    yield lowest
    for each in promised(kind.planner):
        yield dataclasses.replace(lowest, expansion=each)
    room_bytes = kind.planner.unplanned.peak_bytes - lowest.expansion.peak_bytes
    for peak_share, kept_share in itertools.product(_PEAK_SHARES, _KEPT_SHARES):
        limit = lowest.expansion.peak_bytes + int(peak_share * room_bytes)
        planner = make_planner(region.module, _pressed(kind, limit, kept_share), region_recipe(recipe))
        remaining_s = end - time.monotonic()
        if remaining_s <= 0 and peak_share < 1:
            return
        try:
            yield planner.solve(limit, time_limit_s=max(_SHORTEST_SEARCH_S, remaining_s / 8))
        except InfeasibleBudget:
            continue


def _pressed(kind: Kind, limit: int, kept_share: float) -> Prepared:
    """The same costs, but what lives when the forward pass ends is limited to a share."""
    prepared = kind.prepared
    last = max(n for n, each in enumerate(prepared.graph.operations) if each.phase is Phase.FORWARD)
    live_bytes = _live_bytes(kind, last)
    operation = prepared.graph.operations[last]
    least = {*prepared.graph.resident, *operation.inputs, *operation.outputs}
    least_bytes = sum(prepared.graph.storages[each].size_bytes for each in least)
    allowed_bytes = least_bytes + int(kept_share * max(0, live_bytes - least_bytes))
    workspaces = list(prepared.costs.workspace_bytes)
    workspaces[last] = max(workspaces[last], limit - allowed_bytes)
    costs = dataclasses.replace(prepared.costs, workspace_bytes=workspaces)
    return dataclasses.replace(prepared, costs=costs)


def _live_bytes(kind: Kind, operation: int) -> int:
    """What lives in the unplanned run while an operation of the forward pass runs."""
    timeline = simulate(kind.prepared.graph, kind.unplanned)
    name = kind.prepared.graph.operations[operation].name
    return next(moment.live_bytes for moment in timeline.moments if moment.label == name)


def _options(region: Region, programs: Sequence[_Found]) -> list[Option]:
    around = region.marked.surroundings()
    return [
        Option(footprint=region_footprint(region, around, each.program), extra_us=each.solution.expansion.extra_us)
        for each in programs
    ]


def _region_plan(region: Region, found: _Found, recipe: Recipe) -> Plan:
    kind = region.kind
    solution = dataclasses.replace(found.solution, bound_us=min(0.0, found.solution.expansion.extra_us))
    recipe = dataclasses.replace(region_recipe(recipe), starts=region.starts)
    return write_plan(region.module, region.sample, kind.planner, kind.prepared, recipe, solution, None, 0.0)


def _whole_fates(plans: dict[str, Plan]) -> Iterator[Fate]:
    for name, plan in plans.items():
        for fate in plan.fates:
            yield dataclasses.replace(fate, module=f"{name}.{fate.module}".strip("."))
