"""From a captured step with its costs to a plan."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from memfit.capture.sample import Sample
from memfit.describe import describe_sample, device_of, model_digest
from memfit.errors import InfeasibleBudget
from memfit.measure.optimizer import is_optimizer_name, optimizer_name
from memfit.plan.expand import program_of
from memfit.plan.plan import Plan, fates_of
from memfit.plan.problem import Problem
from memfit.plan.select import selected_values
from memfit.plan.solve import Planner, Solution
from memfit.prepare import Prepared, with_compiled_costs
from memfit.recipe import LOWERING, Recipe, budget_bytes
from memfit.units import format_bytes

_MOST_CORRECTIONS = 3  # of what stretches take that are compiled for the plan


def make_planner(model: nn.Module, prepared: Prepared, recipe: Recipe) -> Planner:
    """A planner for all budgets of one captured step."""
    problem = Problem(
        prepared.graph,
        prepared.costs,
        optimizer=prepared.optimizer,
        granularity_bytes=prepared.granularity_bytes,
        runs_again="recompute" in recipe.allow,
    )
    modules = dict(model.named_modules())
    dropped = selected_values(problem, recipe.recompute, modules, "recompute")
    kept = selected_values(problem, recipe.keep, modules, "keep") & ~dropped | problem.not_made_again
    return Planner(problem, kept=kept, dropped=dropped)


def solve(planner: Planner, prepared: Prepared, recipe: Recipe) -> tuple[Solution, int | None]:
    """The plan for the recipe's budget, and that budget in bytes."""
    if recipe.budget is None:
        return planner.by_hand(), None
    if recipe.budget == "smallest":
        return _smallest(planner, prepared, recipe)
    limit = budget_bytes(recipe.budget, prepared.unplanned_peak_bytes)
    try:
        return planner.solve(limit, time_limit_s=recipe.time_limit_s, report=recipe.report), limit
    except InfeasibleBudget:
        smallest, smallest_bytes = _smallest(planner, prepared, recipe)
        if smallest_bytes <= limit:
            return smallest, limit
        raise _infeasible(planner, recipe, limit, smallest, smallest_bytes) from None


def _smallest(planner: Planner, prepared: Prepared, recipe: Recipe) -> tuple[Solution, int]:
    """The lowest peak that can be found, in half of the time, and then the fastest plan of that peak in the rest."""
    end = time.monotonic() + recipe.time_limit_s
    lowest = planner.smallest(time_limit_s=recipe.time_limit_s / 2)
    simulated_bytes = prepared.peak_bytes(program_of(planner.problem, lowest.expansion))
    limit = max(simulated_bytes, lowest.expansion.peak_bytes)  # the search counts small values a little longer
    if lowest.interrupted:
        return lowest, limit
    planner.found.append(lowest.expansion)  # a start for the search
    try:
        return planner.solve(limit, time_limit_s=end - time.monotonic(), report=recipe.report), limit
    except InfeasibleBudget:  # what was asked for by hand has no plan under the unplanned peak
        return lowest, limit


def make_plan(model: nn.Module, sample: Sample, planner: Planner, prepared: Prepared, recipe: Recipe) -> Plan:
    """Solve, and write down what was found and what is known about it."""
    start = time.monotonic()
    solution, limit = solve(planner, prepared, recipe)
    for _ in range(_MOST_CORRECTIONS):
        corrected = with_compiled_costs(model, prepared, program_of(planner.problem, solution.expansion))
        if corrected is None:
            break
        prepared, planner = corrected, make_planner(model, corrected, recipe)
        if not _is_within(limit, planner, prepared, solution):
            prepared, planner = _without_guesses(model, planner, prepared, recipe, solution)
            solution, limit = solve(planner, prepared, recipe)
    else:
        prepared, planner = _believed(model, planner, prepared, recipe, solution, limit)
    seconds = prepared.seconds + time.monotonic() - start
    return write_plan(model, sample, planner, prepared, recipe, solution, limit, seconds)


def _believed(
    model: nn.Module, planner: Planner, prepared: Prepared, recipe: Recipe, solution: Solution, limit: int | None
) -> tuple[Prepared, Planner]:
    """Costs of the last solution as it runs, where none was corrected for good; refused if it is over the limit."""
    corrected = with_compiled_costs(model, prepared, program_of(planner.problem, solution.expansion))
    if corrected is None:
        return prepared, planner
    planner = make_planner(model, corrected, recipe)
    if limit is not None and not _is_within(limit, planner, corrected, solution):
        peak_bytes = corrected.peak_bytes(program_of(planner.problem, solution.expansion))
        raise _infeasible(planner, recipe, limit, solution, peak_bytes)
    return corrected, planner


def _is_within(limit: int | None, planner: Planner, prepared: Prepared, solution: Solution) -> bool:
    """Whether a solution keeps to a limit with the costs as they are now; what it takes is the same."""
    return limit is None or prepared.peak_bytes(program_of(planner.problem, solution.expansion)) <= limit


def _without_guesses(
    model: nn.Module, planner: Planner, prepared: Prepared, recipe: Recipe, solution: Solution
) -> tuple[Prepared, Planner]:
    """A planner that knows the memory of all stretches, where guesses have led over the budget."""
    program = program_of(planner.problem, solution.expansion)
    measured = with_compiled_costs(model, prepared, program, everything=True) if prepared.put_off else None
    return (prepared, planner) if measured is None else (measured, make_planner(model, measured, recipe))


def write_plan(
    model: nn.Module,
    sample: Sample,
    planner: Planner,
    prepared: Prepared,
    recipe: Recipe,
    solution: Solution,
    limit: int | None,
    seconds: float,
) -> Plan:
    """A solution and what is known about it, as a plan."""
    own_us = planner.problem.own_time_us
    step_us = own_us if prepared.unplanned_step_us is None else prepared.unplanned_step_us
    program = program_of(planner.problem, solution.expansion)
    return Plan(
        model=type(model).__name__,
        model_digest=model_digest(model),
        sample=describe_sample(sample),
        torch_version=torch.__version__,
        device=device_of(model) if recipe.device is None else recipe.device.name,
        optimizer=None if recipe.optimizer is None else optimizer_name(recipe.optimizer),
        allow=recipe.allow,
        rewrites=prepared.rewrites,
        outputs=recipe.outputs,
        backward_from=recipe.backward_from,
        budget_bytes=limit,
        peak_bytes=prepared.peak_bytes(program),
        unplanned_peak_bytes=prepared.unplanned_peak_bytes,
        persistent_bytes=prepared.persistent_bytes,
        optimizer_state_bytes=prepared.optimizer.state_bytes,
        floor_bytes=planner.floor_bytes(),
        floor_operation=floor_name(planner),
        step_us=step_us,
        extra_us=solution.expansion.extra_us + own_us - step_us,
        bound_us=solution.bound_us + own_us - step_us,
        times_measured=prepared.times_measured,
        plan_seconds=seconds,
        log=solution.log,
        fates=fates_of(prepared.graph, program),
        program=program,
        step=prepared.captured_step(),
    )


def recipe_of(plan: Plan) -> Recipe:
    """What a plan was made by, as far as it is written down."""
    named = plan.optimizer if is_optimizer_name(plan.optimizer) else None
    limit = plan.budget_bytes if plan.budget_bytes is not None else plan.peak_bytes
    return Recipe(
        budget=limit if named else limit - plan.optimizer_state_bytes,  # what cannot be named cannot be counted again
        optimizer=named,
        allow=plan.allow,
        outputs=plan.outputs,
        backward_from=plan.backward_from,
    )


class Known(Protocol):
    """What is known of a step before it is planned."""

    @property
    def unplanned_peak_bytes(self) -> int: ...

    @property
    def persistent_bytes(self) -> int: ...


def frontier_recipes(recipe: Recipe, known: Known, fractions: Sequence[float]) -> Iterator[Recipe]:
    """One recipe a point of the curve, biggest budget first: what is found at one is a start for the next."""
    part_bytes = known.unplanned_peak_bytes - known.persistent_bytes
    for fraction in sorted(fractions, reverse=True):
        yield dataclasses.replace(recipe, budget=known.persistent_bytes + int(fraction * part_bytes))
    yield dataclasses.replace(recipe, budget="smallest")


def floor_name(planner: Planner) -> str:
    """The operator whose working set no plan can be below, in words."""
    index = planner.floor_operation()
    if index < 0:
        return "the optimizer's step"
    operation = planner.problem.graph.operation(index)
    return f"{operation.target} in {operation.module}" if operation.module else operation.target


def _infeasible(
    planner: Planner, recipe: Recipe, limit: int, smallest: Solution, smallest_bytes: int
) -> InfeasibleBudget:
    share = smallest.expansion.extra_us / planner.problem.own_time_us
    lowering = ", ".join(repr(each) for each in LOWERING if each not in recipe.allow)
    advice = f"give a bigger budget, a smaller batch, or allow more ({lowering})"
    if planner.floor_operation() < 0:  # a smaller batch does not help
        advice = "give a bigger budget, or an optimizer that keeps less"
    return InfeasibleBudget(
        f"no plan of {format_bytes(limit)} was found: the smallest that was needs {format_bytes(smallest_bytes)} "
        f"({share:+.0%} time), and {floor_name(planner)} alone needs {format_bytes(planner.floor_bytes())}; "
        f"{advice}",
        smallest_bytes=smallest_bytes,
        floor_bytes=planner.floor_bytes(),
        operation=floor_name(planner),
    )
