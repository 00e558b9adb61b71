"""Run a model by a plan in regions.

Note [Other calls of a region]
    A plan in regions is for the step it was made for. A call of another kind keeps the region's decisions if it has
    the same operations, whatever its sizes, with a warning where it takes more, and otherwise runs by the region's own
    forward; so does every call after a few kinds, because a region whose shapes follow the data would be captured anew
    in every step.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from memfit.capture.calls import Loss, NotedCall, noted_calls
from memfit.capture.sample import Sample, cut_off
from memfit.capture.spilled import SpillFile
from memfit.errors import ExecutionError, InvalidFile, MemfitError
from memfit.execute.attach import PlannedForward, attach, check_unplanned, regions_of, remove
from memfit.execute.call import Call, OwnForward
from memfit.execute.compiled import CompiledCall
from memfit.internal import internal_errors
from memfit.pipeline import recipe_of
from memfit.plan.plan import Plan
from memfit.plan.simulate import simulate
from memfit.plan.validate import check_program
from memfit.prepare import planned_graph, traced_for
from memfit.regions.fullest import fullest_seed
from memfit.runner import check_equal_to_eager, other_call

_MOST_KINDS = 8  # of calls that one region captures


@dataclasses.dataclass
class RegionRunner:
    """What the planned forward of a region asks for when a new kind of call comes."""

    plan: Plan  # of the region
    whole: Plan
    only_the_plan: bool = False  # refuse a call that the plan is not for
    kinds: int = 0  # captured so far
    planned_bytes: int | None = None  # that the call takes which was planned, once it came
    operations: tuple[str, ...] = ()  # that it runs

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if self.kinds >= _MOST_KINDS:
            return OwnForward(model.forward)
        self.kinds += 1
        try:
            with internal_errors(f"capturing a call of the region {type(model).__name__}"):
                return self._captured(model, cut_off(args, kwargs))
        except MemfitError as error:
            if self.only_the_plan:
                raise
            warnings.warn(
                f"a call of the region {type(model).__name__} runs unplanned, so that the step may be over its budget: "
                f"{error}",
                stacklevel=2,
            )
            return OwnForward(model.forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RegionRunner":
        return RegionRunner(plan=self.plan, whole=self.whole)  # a copy captures its own calls

    def _captured(self, model: nn.Module, example: Sample) -> Call:
        recipe = recipe_of(self.plan)
        with traced_for(model, example, recipe, with_hooks=False) as joint:
            check_equal_to_eager(type(model).__name__, joint)
            graph = planned_graph(joint, recipe)
            is_planned = graph.digest() == self.plan.program.graph_digest
            if self.only_the_plan and not is_planned:
                raise InvalidFile(other_call(self.plan, example))
            self._check_operations(tuple([each.target for each in graph.operations]), is_planned=is_planned)
            check_program(graph, self.plan.program)
            self._compare(simulate(graph, self.plan.program).peak_bytes, is_planned=is_planned)
            return CompiledCall(joint, graph, self.plan.program)

    def _check_operations(self, operations: tuple[str, ...], *, is_planned: bool) -> None:
        """Refuse a call to which the decisions of the planned one say nothing."""
        if is_planned:
            self.operations = operations
        elif self.operations and operations != self.operations:
            raise ExecutionError(
                "it runs other operators than the call that was planned, as where an argument is None now or was then; "
                "give fit a sample like the calls that take most, or give all calls the same arguments"
            )

    def _compare(self, peak_bytes: int, *, is_planned: bool) -> None:
        """Warn of a call that takes more than the one that was planned."""
        if is_planned:
            self.planned_bytes = peak_bytes
        elif self.planned_bytes is not None and peak_bytes > self.planned_bytes:
            warnings.warn(
                f"a part of this {self.whole.model} is given more than in the step that was planned region by region; "
                "the step may be over its budget: give fit the largest sample",
                stacklevel=2,
            )


def apply_regions(plan: Plan, model: nn.Module, sample: Sample | None, loss: Loss | None = None) -> nn.Module:
    """Attach the plans of all regions; with a sample, all are captured at once and must be what was planned.

    To find what regions are given, a step is run on the sample: from the `loss`, if there is one outside of the model.
    """
    check_unplanned(model)
    fits = plan.budget_bytes is None or plan.unplanned_peak_bytes <= plan.budget_bytes
    with contextlib.nullcontext() if fits or sample is None else SpillFile() as file:
        options: dict[str, Any] = {"backward_from": plan.backward_from, "file": file, "loss": loss}
        calls = {} if sample is None else noted_calls(model, sample, **options)
        if sample is not None and not plan.regions.keys() <= calls.keys():
            calls = noted_calls(model, sample, seed=fullest_seed(model, sample), **options)
        _attach_all(plan, model, sample, calls)
    return model


def _attach_all(plan: Plan, model: nn.Module, sample: Sample | None, calls: Mapping[str, list[NotedCall]]) -> None:
    try:
        for name, region in plan.regions.items():
            runner = RegionRunner(plan=region, whole=plan, only_the_plan=sample is not None)
            forward = attach(_part(model, name), runner, whole=model)
            if sample is not None:
                _capture(forward, name, calls.get(name, []))
            runner.only_the_plan = False
    except BaseException:
        remove(model)
        raise


def plan_in_regions(model: nn.Module) -> Plan | None:
    """The plan that the regions of a model run by."""
    runners = [forward.compile_call for forward in regions_of(model)]
    return next((runner.whole for runner in runners if isinstance(runner, RegionRunner)), None)


def _capture(forward: PlannedForward, name: str, calls: list[Any]) -> None:
    if not calls:
        raise InvalidFile(
            f"the plan has the region {name!r}, which is not called on this sample; plan again for it, or apply the "
            "plan without a sample"
        )
    given = calls[0].sample
    forward.capture(given.args, dict(given.kwargs))


def _part(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise InvalidFile(
            f"the plan has the region {name!r}, which this {type(model).__name__} does not have; plan again"
        ) from None
