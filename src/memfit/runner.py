"""Makes the captured calls of one model: the planned one, and those of other shapes as they come.

Note [Other shapes]
    A call of another shape than the plan's is captured anew. If it fits the budget unplanned, it runs so. If it has
    the same operations and decisions that were made before keep it within the budget, they serve it too, the
    fastest of them. Otherwise it is planned under the same budget. Only that needs times, and so real steps; a
    simulated peak needs none.
"""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from memfit.alone import alone
from memfit.capture.lower import lower
from memfit.capture.numbers import is_following
from memfit.capture.sample import Sample, without_graph
from memfit.capture.trace import Joint
from memfit.collecting import collected_later
from memfit.describe import describe_sample
from memfit.errors import CaptureError, InvalidFile, first_line
from memfit.execute.call import Call, OwnForward
from memfit.execute.compiled import CompiledCall
from memfit.execute.kept_gradients import KeptGradients
from memfit.internal import internal_errors
from memfit.ir import Graph, LossMemory, OptimizerMemory, Program
from memfit.layout import with_layout
from memfit.measure.allocations import Quiet
from memfit.pipeline import StepPlanner, make_planner
from memfit.plan.expand import program_of
from memfit.plan.plan import Plan
from memfit.plan.problem import handed_out_together
from memfit.plan.validate import check_program
from memfit.prepare import (
    Prepared,
    Traced,
    as_traced,
    extended_graph,
    planned_graph,
    prepare,
    step_loss_memory,
    step_optimizer_memory,
    traced_for,
    with_beside,
    with_compiled_costs,
)
from memfit.recipe import Budget, OutsideLoss, Recipe
from memfit.remembered import can_run_as_planned, folder_of, keep_plan, kept_plans, place_in
from memfit.trial import seconds_by_call
from memfit.units import format_bytes
from memfit.ways import best_way

log = logging.getLogger(__name__)


InRegions = Callable[[Recipe, nn.Module, Sample, CaptureError], None]  # plans the parts of a model


@dataclasses.dataclass
class Runner:
    """What a planned forward asks for when a new kind of call comes."""

    recipe: Recipe
    plan: Plan | None = None  # None: made at the first call
    only_the_plan: bool = False  # refuse a call that the plan is not for
    minds_kept_gradients: bool = True  # whether to say so where gradients stay that the budget does not count
    others: list[Plan] = dataclasses.field(default_factory=list)  # made for calls of other shapes
    searches: int = 0
    folder: Path | None = None  # of the plans that are remembered
    place: Path | None = None  # of this one
    graph: Graph | None = None  # that the plan was made for, while it is not kept
    quiet: Quiet | None = None  # what is known of the operations of the first call
    in_regions: InRegions | None = None  # for later calls that cannot be captured whole

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        with alone(), internal_errors(f"planning a call of {type(model).__name__}"):
            return self._made(model, without_graph(Sample(args, kwargs)))

    def _made(self, model: nn.Module, example: Sample) -> Call:
        if self.plan is not None or self.recipe.is_unplanned:
            return self._later(model, example)
        if self.recipe.remember and not self.recipe.is_for_process:
            with collected_later():  # nothing is run
                remembered = self._remembered(model, example)
            if remembered is not None:
                return remembered
        return self._planned_first(model, example)

    def _later(self, model: nn.Module, example: Sample) -> Call:
        """By what is known; in regions from now on, if the model has become one that cannot be captured whole."""
        try:
            return self._traced(model, example, None)
        except CaptureError as error:
            if self.in_regions is None or self.plan is None or is_following():
                raise
            self.in_regions(self.recipe, model, example, error)
            return OwnForward(model.forward)

    def _planned_first(self, model: nn.Module, example: Sample) -> CompiledCall:
        """By a plan that is made for it, in the best of several ways."""
        recipe, unplanned = with_layout(model, example, self.recipe, with_hooks=False)

        def made(way: Recipe) -> "_First":
            runner = Runner(recipe=way, folder=self.folder)
            call = runner._traced(model, example, unplanned if way.channels_last else None)
            assert runner.plan is not None
            return _First(runner, runner.plan, call)

        def seconds_of(ways: Sequence["_First"]) -> list[float] | None:
            backward_from = ways[0].plan.backward_from
            settled = dataclasses.replace(recipe, backward_from=backward_from)
            return seconds_by_call(model, example, settled, [each.call for each in ways])

        runner, plan, call = best_way(recipe, made, lambda each: each.plan, seconds_of)
        self._begin(plan)
        self.searches, self.quiet = runner.searches, runner.quiet
        if runner.place is not None and runner.graph is not None and can_run_as_planned(runner.graph, plan.program):
            keep_plan(runner.place, plan)
        return call

    def _traced(self, model: nn.Module, example: Sample, unplanned: Traced | None) -> CompiledCall:
        doing = f"planning a step of {type(model).__name__}"
        with internal_errors(doing), traced_for(model, example, self.recipe, with_hooks=False) as joint:
            check_equal_to_eager(type(model).__name__, joint)
            self.recipe = as_traced(self.recipe, joint)
            if self.recipe.is_unplanned:
                return CompiledCall(joint, lower(joint))
            return self._planned(model, joint, example, unplanned)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Runner":
        return self  # what it holds does not change with the copy

    def _planned(self, model: nn.Module, joint: Joint, example: Sample, unplanned: Traced | None) -> CompiledCall:
        before = Traced.of(joint)
        is_first = self.plan is None
        beside = self._memory_beside(model, joint, example, before.graph) if is_first and self.folder else None
        extended = extended_graph(joint, self.recipe)
        graph = handed_out_together(extended)
        traced: dict[str, Any] = {"before": before, "extended": extended}
        if self.plan is None:
            if self.folder is not None and beside is not None:
                self.place = place_in(self.folder, graph, *beside)
            prepared = prepare(model, joint, example, self.recipe, may_put_off=True, unplanned=unplanned, **traced)
            return self._searched(model, joint, prepared, example)
        if graph.digest() == self.plan.program.graph_digest:
            check_program(graph, self.plan.program)
            return self._compiled_by(self.plan, joint, graph)
        if self.only_the_plan:
            raise InvalidFile(other_call(self.plan, example))
        for timed in (False, True):  # see Note [Other shapes]
            prepared = prepare(model, joint, example, self.recipe, timed=timed, known=self.quiet, **traced)
            program = self._shared(model, prepared)
            if program is not None:
                kept = self._kept_gradients(self.recipe.budget, prepared.peak_bytes(program))
                return CompiledCall(joint, prepared.graph, program, kept_gradients=kept)
        return self._searched(model, joint, prepared, example)

    def _remembered(self, model: nn.Module, example: Sample) -> CompiledCall | None:
        """By the plan of an earlier run; None if there is none."""
        self.folder = folder_of(self.recipe, model, example)
        plans = kept_plans(self.folder)
        for allow in dict.fromkeys(plan.allow for plan in plans.values()):
            try:
                call = self._remembered_for(dataclasses.replace(self.recipe, allow=allow), model, example, plans)
            except CaptureError as error:  # not of the model as it was then, maybe of what was allowed then
                log.info("not captured as in an earlier run: %s", first_line(error))
                continue
            if call is not None:
                return call
        return None

    def _remembered_for(
        self, recipe: Recipe, model: nn.Module, example: Sample, plans: Mapping[Path, Plan]
    ) -> CompiledCall | None:
        assert self.folder is not None
        with traced_for(model, example, recipe, with_hooks=False) as joint:
            beside = self._memory_beside(model, joint, example)
            graph = planned_graph(joint, recipe)
            plan = plans.get(place_in(self.folder, graph, *beside))
            return None if plan is None else self._taken(plan, model, joint, graph)

    def _memory_beside(
        self, model: nn.Module, joint: Joint, example: Sample, plain: Graph | None = None
    ) -> tuple[OptimizerMemory, LossMemory | None]:
        """Return what optimizer and outside loss take, before the trace is rewritten; it is lowered if it was not."""
        if self.recipe.optimizer is None and self.recipe.loss is None:
            return with_beside(OptimizerMemory(), self.recipe), None
        plain = plain or lower(joint)
        memory = self._optimizer_memory(model, plain)
        return memory, step_loss_memory(model, joint, example, plain, memory, self.recipe)

    def _optimizer_memory(self, model: nn.Module, graph: Graph) -> OptimizerMemory:
        return with_beside(step_optimizer_memory(self.recipe.optimizer, model, graph, self.recipe.device), self.recipe)

    def _taken(self, plan: Plan, model: nn.Module, joint: Joint, graph: Graph) -> CompiledCall | None:
        """By a plan of an earlier run, unless it cannot be run here as it was planned."""
        if not can_run_as_planned(graph, plan.program):
            return None
        check_equal_to_eager(type(model).__name__, joint)
        log.info("the plan of an earlier run is taken, with a peak of %s", format_bytes(plan.peak_bytes))
        self._begin(plan)
        return self._compiled_by(plan, joint, graph)

    def _begin(self, plan: Plan) -> None:
        """The plan of the first call; later ones keep to its budget."""
        self.plan = plan
        loss = None if plan.step is None else OutsideLoss.known(plan.step.loss)  # which holds no batch
        self.recipe = dataclasses.replace(
            self.recipe,
            budget=plan.budget_bytes,
            allow=plan.allow,
            backward_from=plan.backward_from,
            loss=loss,
            report=None,
            progress=None,
        )

    def _searched(self, model: nn.Module, joint: Joint, prepared: Prepared, example: Sample) -> CompiledCall:
        planning = StepPlanner(model, joint, example, self.recipe, prepared)
        made = planning.plan(self.recipe)
        prepared = planning.prepared
        self.searches += 1
        self.quiet = self.quiet or prepared.quiet
        if self.plan is None:
            self._begin(made)
            self.graph = prepared.graph
        else:
            self.others.append(made)
        return self._compiled_by(made, joint, prepared.graph)

    def _compiled_by(self, plan: Plan, joint: Joint, graph: Graph) -> CompiledCall:
        is_counted = plan.external_bytes > 0
        kept = None if is_counted else self._kept_gradients(plan.budget_bytes, plan.peak_bytes)
        return CompiledCall(joint, graph, plan.program, kept_gradients=kept)

    def _kept_gradients(self, budget: Budget, peak_bytes: int) -> KeptGradients | None:
        is_counted = self.recipe.beside_bytes > 0 or not self.minds_kept_gradients
        return None if is_counted or not isinstance(budget, int) else KeptGradients(budget, peak_bytes)

    def _shared(self, model: nn.Module, prepared: Prepared) -> Program | None:
        """The fastest of the programs that are known whose peak is within the budget."""
        assert self.plan is not None
        limit = self.recipe.budget
        if not isinstance(limit, int):
            return None
        known = [(each.slowdown, each.program) for each in (self.plan, *self.others)]
        if not self.recipe.recompute:
            planner = make_planner(model, prepared, self.recipe)
            known.append((0.0, program_of(planner.problem, planner.unplanned)))
        fitting = (each for _, each in sorted(known, key=lambda one: one[0]) if _fits(model, prepared, each, limit))
        return next(fitting, None)


class _First(NamedTuple):
    """One way to run the first call."""

    runner: Runner
    plan: Plan
    call: CompiledCall


def _fits(model: nn.Module, prepared: Prepared, program: Program, limit_bytes: int) -> bool:
    """Whether decisions serve a call of another shape: same operations, peak within the budget."""
    try:
        check_program(prepared.graph, program)
    except InvalidFile:
        return False
    if not prepared.can_run(program) or prepared.peak_bytes(program) > limit_bytes:
        return False
    seen = with_compiled_costs(model, prepared, program)  # in the forms in which it runs stretches
    return seen is None or seen.peak_bytes(program) <= limit_bytes


def other_call(plan: Plan, example: Sample) -> str:
    """Why a plan is not for a call."""
    found = describe_sample(example)
    if found != plan.sample:
        return f"the plan was made for the sample {plan.sample}, the sample is {found}; plan again for it"
    return (
        f"the plan was made for another computation: on the same sample this {plan.model} runs other operations than "
        "when it was planned (its code, options, modes of its parts, autocast or torch's version differ); plan again"
    )


def check_equal_to_eager(name: str, joint: Joint, *, warn: bool = True) -> None:
    """Refuse what would not compute what the eager run computes, or warn where that is not certain."""
    if joint.cast_anew:
        raise CaptureError(
            f"{name} uses {', '.join(joint.cast_anew)} more than once under autocast, which casts a parameter once "
            "and keeps the cast, while the captured graph would cast it at every use and round differently; use "
            "torch.autocast(..., cache_enabled=False), under which both do the same"
        )
    if joint.avoided_values and warn:
        warnings.warn(
            f"the forward of {name} looks at values of the batch; it was captured the way its library offers for "
            "traces, which may round differently from the eager run",
            stacklevel=2,
        )
