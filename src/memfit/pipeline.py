"""From a captured step with its costs to a plan."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from memfit.capture.sample import Sample
from memfit.capture.trace import Joint
from memfit.describe import describe_sample, device_of, is_for_accelerator, model_digest
from memfit.errors import InfeasibleBudget
from memfit.ir import Phase, Program
from memfit.measure.optimizer import is_optimizer_name, optimizer_name
from memfit.ops.offload import OFFLOAD, bring_back
from memfit.ops.registry import name_of
from memfit.partial_loss import peak_with_loss, plan_with_loss
from memfit.plan.bounding import wait_until_quiet
from memfit.plan.expand import program_of
from memfit.plan.identity import identity_program
from memfit.plan.plan import Plan, fates_of
from memfit.plan.prefetch import brought_back_early
from memfit.plan.problem import Problem
from memfit.plan.promises import promise, promised
from memfit.plan.select import selected_values
from memfit.plan.solve import OPTIMIZER_STEP, OUTSIDE_LOSS, Planner, Solution
from memfit.prepare import Prepared, held_gradient_bytes, with_compiled_costs, with_step_times
from memfit.process_budget import ProcessLimit, peak_of_process, process_limit
from memfit.recipe import LOWERING, OutsideLoss, Recipe, budget_bytes
from memfit.shortage import Shortage, always_live, gradients_of
from memfit.units import format_bytes

_MOST_CORRECTIONS = 3  # of what fused kernels take that are compiled for the plan
_MOST_ROUNDS_OF_RESERVED = 5  # fewer bytes may be cut up worse
_MOST_ROUNDS = 3  # of planning, running the plan with a clock, and planning again


@dataclasses.dataclass(frozen=True, slots=True)
class _Effort:
    """Limit the search for a plan."""

    seconds: float = math.inf  # or the recipe's limit, if that is lower
    enough: float | None = None  # a plan that slows the step down by no more ends the search


_TO_BE_TIMED = _Effort(seconds=0.8, enough=0.3)  # for a plan that is only made to be run with a clock
_ALL = _Effort()
_ONCE_MORE = _Effort(seconds=0.8)  # for a plan whose times are known but for a few


def make_planner(model: nn.Module, prepared: Prepared, recipe: Recipe) -> Planner:
    """A planner for all budgets of one captured step."""
    problem = Problem(
        prepared.graph,
        prepared.costs,
        optimizer=prepared.optimizer,
        loss=prepared.loss,
        granularity_bytes=prepared.granularity_bytes,
        runs_again="recompute" in recipe.allow,
    )
    modules = dict(model.named_modules())
    dropped = selected_values(problem, recipe.recompute, modules, "recompute")
    kept = selected_values(problem, recipe.keep, modules, "keep") & ~dropped | problem.not_made_again
    return Planner(problem, kept=kept, dropped=dropped)


def solve(planner: Planner, prepared: Prepared, recipe: Recipe, effort: _Effort = _ALL) -> tuple[Solution, int | None]:
    """The plan for the recipe's budget, and that budget in bytes."""
    recipe = dataclasses.replace(recipe, time_limit_s=min(effort.seconds, recipe.time_limit_s))
    if recipe.budget is None:
        return planner.by_hand(), None
    if recipe.budget == "smallest":
        return _smallest(planner, prepared, recipe)
    limit = budget_bytes(recipe.budget, prepared.unplanned_peak_bytes)
    try:
        found = planner.solve(limit, time_limit_s=recipe.time_limit_s, report=recipe.report, enough=effort.enough)
        return found, limit
    except InfeasibleBudget:
        smallest, smallest_bytes = _smallest(planner, prepared, recipe)
        if smallest_bytes <= limit:
            return smallest, limit
        promise(planner, [smallest.expansion])  # see Note [Promises of a refusal] in `plan/promises.py`
        raise _infeasible(planner, recipe, limit, smallest, smallest_bytes, prepared.bounded) from None


def _to_be_timed(planner: Planner, limit_bytes: int) -> Solution:
    """A plan under a limit that is found quickly."""
    return planner.solve(limit_bytes, time_limit_s=_TO_BE_TIMED.seconds, enough=_TO_BE_TIMED.enough)


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


def _infeasible_reserved(plan: Plan, limit_bytes: int) -> InfeasibleBudget:
    assert plan.reserved is not None
    reserved = plan.reserved
    advice = "give a bigger device, or a smaller batch"
    if reserved.best_reserved_bytes <= limit_bytes:
        advice = (
            f"with PYTORCH_CUDA_ALLOC_CONF={reserved.best_setting} the last of them reserves "
            f"{format_bytes(reserved.best_reserved_bytes)}: set it, and give {format_bytes(plan.peak_bytes)} as budget"
        )
    return InfeasibleBudget(
        f"no plan was found for which the caching allocator reserves {format_bytes(limit_bytes)} or less: plans down "
        f"to {format_bytes(plan.peak_bytes)} of tensors reserve {format_bytes(reserved.reserved_bytes)}; {advice}",
        smallest_bytes=reserved.reserved_bytes,
        floor_bytes=plan.floor_bytes,
        operation=plan.floor_operation,
    )


class StepPlanner:
    """Plans of one captured step, at any budget, from costs that are measured as plans need them.

    Note [Plan, run, plan again]
        The unplanned step may not fit this machine, so nothing depends on running it. A first plan is made from times
        of earlier runs, or estimated ones. It fits the budget, so it can be run with a clock around every operator.
        The next plan is made from what was seen. That ends when all a plan runs was timed, after two rounds as a rule.
    """

    def __init__(self, model: nn.Module, joint: Joint, sample: Sample, recipe: Recipe, prepared: Prepared) -> None:
        self._model = model
        self._joint = joint
        self._sample = sample
        self._loss = recipe.loss
        self.prepared = prepared
        self._is_warm = False  # whether steps of this model ran just before
        self.planner = make_planner(model, prepared, recipe)
        self.planner.found += promised(self.planner)

    def plan(self, recipe: Recipe) -> Plan:
        """Solve, and write down what was found and what is known about it; see Note [Plan, run, plan again]."""
        if recipe.counts_reserved:
            return self._plan_for_reserved(recipe)
        if recipe.is_for_process:
            return self._plan_for_process(recipe)
        return plan_with_loss(self._plan, self._peak_with_loss, recipe)

    def _peak_with_loss(self, plan: Plan) -> int | None:
        return peak_with_loss(self._model, self._joint, self._sample, self.prepared, plan.program, self._loss)

    def _plan_for_reserved(self, recipe: Recipe) -> Plan:
        """Plan for what a device can reserve: fewer allocated bytes until the simulated allocator keeps to it."""
        limit_bytes = budget_bytes(recipe.budget, self.prepared.unplanned_peak_bytes)
        budget = limit_bytes
        for _ in range(_MOST_ROUNDS_OF_RESERVED):
            plan = self._plan(dataclasses.replace(recipe, budget=budget))
            if plan.reserved is None or plan.reserved.reserved_bytes <= limit_bytes:
                return dataclasses.replace(plan, budget_bytes=limit_bytes)
            # A little more than is too much: what is allocated less is cut up about as badly.
            over_bytes = plan.reserved.reserved_bytes - limit_bytes
            budget = max(1, min(budget, plan.peak_bytes) - over_bytes * 5 // 4)
        raise _infeasible_reserved(plan, limit_bytes)

    def _plan_for_process(self, recipe: Recipe) -> Plan:
        """Plan for what the process may take: allocated bytes are what is left beside the rest of the process."""
        limit = process_limit(recipe, self._model, self._sample, recipe.optimizer)
        if not limit.is_measured:
            return self._plan(dataclasses.replace(recipe, budget=limit.limit_bytes))
        eager = identity_program(self.prepared.eager)
        peak = peak_of_process(self.prepared, eager, planned=False)
        beside_bytes = limit.takes(peak) - self.prepared.unplanned_peak_bytes
        for _ in range(_MOST_ROUNDS):
            budget = max(1, limit.limit_bytes - beside_bytes)
            try:
                plan = self._plan(dataclasses.replace(recipe, budget=budget))
            except InfeasibleBudget as error:
                needed_bytes = self._needed_of_process(recipe, error.smallest_bytes, limit)
                raise _infeasible_for_process(error, limit, beside_bytes, needed_bytes) from None
            peak = peak_of_process(self.prepared, plan.program, planned=True)
            if limit.takes(peak) <= limit.limit_bytes:
                break
            beside_bytes += limit.takes(peak) - limit.limit_bytes
        return dataclasses.replace(plan, process_peak_bytes=peak.peak_bytes)

    def _needed_of_process(self, recipe: Recipe, smallest_bytes: int | None, limit: ProcessLimit) -> int:
        """Find what `process=` has to be for the smallest plan that was found; 0 if none was."""
        if not smallest_bytes:
            return 0
        plan = self._plan(dataclasses.replace(recipe, budget=smallest_bytes))
        return limit.to_ask_for(limit.takes(peak_of_process(self.prepared, plan.program, planned=True)))

    def _plan(self, recipe: Recipe) -> Plan:
        start = time.monotonic() - self.prepared.seconds
        fitting_bytes = self._fits_as_it_is(recipe)
        if fitting_bytes is not None:
            return self._written(recipe, self.planner.unplanned_solution(), fitting_bytes, start)
        effort = _ALL if self._is_timed() else _TO_BE_TIMED
        for _ in range(_MOST_ROUNDS):
            solution, limit = self._solved(recipe, effort)
            if solution.interrupted:
                break
            if not self._times(recipe, solution, limit) and effort is not _TO_BE_TIMED:
                break
            effort = _ALL if effort is _TO_BE_TIMED else _ONCE_MORE
        else:
            solution, limit = self._solved(recipe, effort)
        return self._written(recipe, solution, limit, start)

    def _fits_as_it_is(self, recipe: Recipe) -> int | None:
        """The budget, if the unplanned step fits it and nothing else is asked for; None if it does not."""
        if recipe.budget in (None, "smallest") or recipe.recompute or recipe.keep or recipe.rewrites:
            return None
        if recipe.compiles or recipe.channels_last:  # for speed, which has to be measured
            return None
        limit = budget_bytes(recipe.budget, self.prepared.unplanned_peak_bytes)
        return limit if self.planner.unplanned.peak_bytes <= limit else None

    def _is_timed(self) -> bool:
        """Return whether all that an unplanned step runs was timed, or cannot be."""
        unplanned = program_of(self.planner.problem, self.planner.unplanned)
        return not self.prepared.may_be_timed or self.prepared.are_timed(unplanned)

    def _solved(self, recipe: Recipe, effort: _Effort) -> tuple[Solution, int | None]:
        """Solve with costs that hold for what the solution runs: its kernels are compiled and measured."""
        solution, limit = self._found(recipe, effort)
        for _ in range(_MOST_CORRECTIONS):
            corrected = with_compiled_costs(self._model, self.prepared, self._program(solution))
            if corrected is None:
                return solution, limit
            self._use(corrected, recipe, solution)
            if not self._is_within(limit, solution):
                self._measure_all_kernels(recipe, solution)
                solution, limit = self._found(recipe, effort)
        self._believe(recipe, solution, limit)
        return solution, limit

    def _found(self, recipe: Recipe, effort: _Effort) -> tuple[Solution, int | None]:
        """Search as hard as is asked for; for all the time there is before a budget is refused."""
        if effort is not _ALL:
            with contextlib.suppress(InfeasibleBudget):
                return solve(self.planner, self.prepared, recipe, effort)
        return solve(self.planner, self.prepared, recipe)

    def _times(self, recipe: Recipe, solution: Solution, limit: int | None) -> bool:
        """Run a solution with a clock, if there is something to learn from it; whether something was learned."""
        program: Program | None = self._program(solution)
        assert program is not None
        if not self.prepared.may_be_timed or self.prepared.are_timed(program):
            return False
        if recipe.report_stage is not None:
            recipe.report_stage("timing operators in steps of the plan")
        if limit is not None:
            program = self._beside_gradients(program, limit)
        if program is None:
            return False
        wait_until_quiet()
        timed = with_step_times(
            self._model, self._joint, self._sample, self.prepared, recipe, program, limit, is_warm=self._is_warm
        )
        if timed is self.prepared:
            return False
        self._is_warm = True
        self._use(timed, recipe, solution)
        return True

    def _beside_gradients(self, program: Program, limit: int) -> Program | None:
        """A program that can be run beside gradients of an earlier step, if there are some; None if there is none."""
        gradient_bytes = held_gradient_bytes(self._model)
        if not gradient_bytes or self.prepared.peak_bytes(program) + gradient_bytes <= limit:
            return program
        try:
            smaller = _to_be_timed(self.planner, limit - gradient_bytes)
        except InfeasibleBudget:
            return None
        return self._program(smaller)

    def _use(self, prepared: Prepared, recipe: Recipe, solution: Solution) -> None:
        """Go on with other costs; plans that were found before are a start for the next search."""
        found = [*self.planner.found, solution.expansion]
        self.prepared, self.planner = prepared, make_planner(self._model, prepared, recipe)
        revalued = (self.planner.expander.revalued(each) for each in found)
        self.planner.found = [each for each in revalued if each.extra_us < math.inf]

    def _believe(self, recipe: Recipe, solution: Solution, limit: int | None) -> None:
        """Take the costs of a solution as it runs, if none was corrected for good; refuse it over the limit."""
        corrected = with_compiled_costs(self._model, self.prepared, self._program(solution))
        if corrected is None:
            return
        self._use(corrected, recipe, solution)
        if limit is not None and not self._is_within(limit, solution):
            peak_bytes = corrected.peak_bytes(self._program(solution))
            raise _infeasible(self.planner, recipe, limit, solution, peak_bytes, corrected.bounded)

    def _measure_all_kernels(self, recipe: Recipe, solution: Solution) -> None:
        """Know the memory of all kernels, where guesses have led over the budget."""
        if self.prepared.put_off:
            measured = with_compiled_costs(self._model, self.prepared, self._program(solution), everything=True)
            if measured is not None:
                self._use(measured, recipe, solution)

    def _is_within(self, limit: int | None, solution: Solution) -> bool:
        """Return whether a solution keeps to a limit with the costs as they are now; what it takes is the same."""
        return limit is None or self.prepared.peak_bytes(self._program(solution)) <= limit

    def _program(self, solution: Solution) -> Program:
        return program_of(self.planner.problem, solution.expansion)

    def _written(self, recipe: Recipe, solution: Solution, limit: int | None, start: float) -> Plan:
        solution = dataclasses.replace(solution, expansion=self.planner.expander.revalued(solution.expansion))
        seconds = time.monotonic() - start
        return write_plan(self._model, self._sample, self.planner, self.prepared, recipe, solution, limit, seconds)


def with_times_within(
    model: nn.Module, joint: Joint, sample: Sample, prepared: Prepared, recipe: Recipe, limit_bytes: int | None
) -> Prepared:
    """Time operators in steps that fit a limit: unplanned ones, or those of a plan that is found quickly.

    Where no plan is found that fits, times stay those of earlier runs, or estimated.
    """
    planner = make_planner(model, prepared, recipe)
    program = program_of(planner.problem, planner.unplanned)
    if not prepared.may_be_timed or prepared.are_timed(program):
        return prepared
    if limit_bytes is not None and prepared.peak_bytes(program) > limit_bytes:
        try:
            program = program_of(planner.problem, _to_be_timed(planner, limit_bytes).expansion)
        except InfeasibleBudget:
            return prepared
    return with_step_times(model, joint, sample, prepared, recipe, program, limit_bytes)


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
    program = _with_copies_early(model, prepared, program_of(planner.problem, solution.expansion), recipe, limit)
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
        external_bytes=recipe.external_bytes,
        floor_bytes=planner.floor_bytes(),
        floor_operation=floor_name(planner),
        step_us=step_us,
        extra_us=solution.expansion.extra_us + own_us - step_us,
        bound_us=solution.bound_us + own_us - step_us,
        times_measured=prepared.are_timed(program),
        plan_seconds=seconds,
        log=solution.log,
        fates=fates_of(prepared.graph, program),
        program=program,
        step=prepared.captured_step(),
        starts=recipe.starts,
    )


def _with_copies_early(
    model: nn.Module, prepared: Prepared, program: Program, recipe: Recipe, limit: int | None
) -> Program:
    """Hide the copies of an accelerator behind what it computes, see `plan/prefetch.py`."""
    if OFFLOAD.technique not in recipe.allow or recipe.device is not None or not is_for_accelerator(model, None):
        return program
    graph = prepared.graph
    numbered = enumerate(graph.alternatives, start=len(graph.operations))
    copies = {number for number, each in numbered if each.target == name_of(bring_back)}
    timeline = prepared.timeline(program)
    return brought_back_early(
        graph,
        program,
        copies,
        live_bytes=[each.live_bytes for each in timeline.moments if each.phase == Phase.BACKWARD],
        limit_bytes=timeline.peak_bytes if limit is None else max(limit, timeline.peak_bytes),
        time_us=prepared.costs.time_us,
    )


def recipe_of(plan: Plan) -> Recipe:
    """What a plan was made by, as far as it is written down."""
    named = plan.optimizer if is_optimizer_name(plan.optimizer) else None
    limit = plan.budget_bytes if plan.budget_bytes is not None else plan.peak_bytes
    return Recipe(
        budget=limit if named else limit - plan.optimizer_state_bytes,  # what cannot be named cannot be counted again
        optimizer=named,
        beside_bytes=plan.external_bytes if named else 0,
        allow=plan.allow,
        outputs=plan.outputs,
        backward_from=plan.backward_from,
        loss=None if plan.step is None else OutsideLoss.known(plan.step.loss),
        starts=plan.starts,
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
    if index == OPTIMIZER_STEP:
        return "the optimizer's step"
    if index == OUTSIDE_LOSS:
        return "the loss"
    operation = planner.problem.graph.operation(index)
    return f"{operation.target} in {operation.module}" if operation.module else operation.target


def _floor_target(planner: Planner) -> str:
    index = planner.floor_operation()
    return "" if index in (OPTIMIZER_STEP, OUTSIDE_LOSS) else planner.problem.graph.operation(index).target


def _infeasible_for_process(
    error: InfeasibleBudget, limit: ProcessLimit, beside_bytes: int, needed_bytes: int
) -> InfeasibleBudget:
    needed = f"; the smallest that would do is process={f'{needed_bytes // 2**20}MiB'!r}" if needed_bytes else ""
    return InfeasibleBudget(
        f"of what the process may take, {format_bytes(limit.set_aside_bytes)} are set aside for planning; of the "
        f"{format_bytes(limit.limit_bytes)} that are left for training, {format_bytes(beside_bytes)} are not for "
        f"tensors{needed}: {error}",
        smallest_bytes=needed_bytes,
        floor_bytes=error.floor_bytes,
        operation=error.operation,
    )


def _infeasible(
    planner: Planner, recipe: Recipe, limit: int, smallest: Solution, smallest_bytes: int, bounded: Collection[str]
) -> InfeasibleBudget:
    """Refuse a budget; `bounded` are operators whose workspace is a bound."""
    problem = planner.problem
    always = always_live(problem.graph, problem.optimizer, problem.loss, recipe.external_bytes)
    gradients = gradients_of(problem.graph)
    floor_bytes = planner.floor_bytes()
    comes_last = planner.floor_operation() == OPTIMIZER_STEP
    before_bytes = sum(always.values()) + (sum(gradients.values()) if comes_last else 0)
    return Shortage(
        limit_bytes=limit,
        smallest_bytes=smallest_bytes,
        slowdown=smallest.expansion.extra_us / problem.own_time_us,
        always=always,
        at_end=gradients,
        floor_bytes=floor_bytes,
        operation=floor_name(planner),
        on_top_bytes=max(0, floor_bytes - before_bytes),
        comes_last=comes_last,
        is_bound=_floor_target(planner) in bounded,
        not_allowed=[each for each in LOWERING if each not in recipe.allow],
    ).error()
