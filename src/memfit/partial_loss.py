"""Measure a planned step whose loss leaves outputs of the model without a gradient.

Note [Fewer gradients]
    A plan is made for gradients of all outputs. Where a loss takes some of them, another backward pass runs: what would
    be a sum keeps the layout of its one summand, and is not written over (Note [No gradient is not zero] in
    `execute/arrivals.py`). That can take more. So where a loss is given and a model has several outputs, a step of the
    plan is run with that loss and measured.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memfit import _torch
from memfit.accelerator import without_autocast
from memfit.capture.rehearse import drop_gradients, nothing_remains
from memfit.capture.sample import Sample
from memfit.capture.trace import Joint
from memfit.describe import device_of
from memfit.errors import InfeasibleBudget
from memfit.execute.compiled import CompiledCall
from memfit.execute.kinds import states_of
from memfit.ir import Program
from memfit.measure.available import available
from memfit.measure.peak import measure_peak
from memfit.outside_loss import forward_as, scalar_of
from memfit.plan.plan import Plan
from memfit.prepare import Prepared
from memfit.recipe import OutsideLoss, Recipe
from memfit.units import format_bytes

_MOST_ROUNDS = 3  # of planning for less
_FREE_SHARE = 0.9  # of the memory that is free: what the step may take of it


def plan_with_loss(plan: Callable[[Recipe], Plan], peak_of: Callable[[Plan], int | None], recipe: Recipe) -> Plan:
    """Plan for fewer bytes until a step with the loss itself keeps to the budget."""
    made = plan(recipe)
    limit, measured_bytes = made.budget_bytes, peak_of(made)
    if limit is None or measured_bytes is None:
        return made
    if recipe.budget == "smallest":
        return _with_peak(made, max(limit, measured_bytes), measured_bytes)
    budget = limit
    for _ in range(_MOST_ROUNDS):
        if measured_bytes <= limit:
            return _with_peak(made, limit, measured_bytes)
        budget = max(1, min(budget, made.peak_bytes) - (measured_bytes - limit))
        try:
            made = plan(dataclasses.replace(recipe, budget=budget))
        except InfeasibleBudget:
            break
        measured_bytes = peak_of(made) or made.peak_bytes
    if measured_bytes > limit:
        made = plan(dataclasses.replace(recipe, budget="smallest"))
        measured_bytes = peak_of(made) or made.peak_bytes
    if measured_bytes > limit:
        raise InfeasibleBudget(
            f"the loss takes some outputs of {made.model} alone; the smallest plan that was found takes "
            f"{format_bytes(measured_bytes)} with it, and the budget is {format_bytes(limit)}",
            smallest_bytes=measured_bytes,
            floor_bytes=made.floor_bytes,
            operation=made.floor_operation,
        )
    return _with_peak(made, limit, measured_bytes)


def _with_peak(plan: Plan, limit: int, measured_bytes: int) -> Plan:
    return dataclasses.replace(plan, budget_bytes=limit, peak_bytes=max(plan.peak_bytes, measured_bytes))


def peak_with_loss(
    model: nn.Module, joint: Joint, sample: Sample, prepared: Prepared, program: Program, loss: OutsideLoss | None
) -> int | None:
    """Measure a step of a program with the loss that is given; None if that is as predicted, or cannot be run."""
    if loss is None or loss.function is None or len(joint.differentiated) < 2 or not prepared.may_be_timed:
        return None
    more_bytes = prepared.peak_bytes(program) - prepared.resident_bytes - prepared.optimizer.state_bytes
    if more_bytes > _FREE_SHARE * available(device_of(model)).free_bytes:
        return None
    function, batch = loss.function, loss.batch
    call = CompiledCall(joint, prepared.graph, program)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(states_of(model), args, kwargs)

    def run() -> None:
        result = function(model, batch)
        with without_autocast():  # see Note [Backward outside autocast]
            scalar_of(result).backward()

    with _torch.no_modes(), nothing_remains(model, sample), torch.enable_grad(), forward_as(model, forward):
        run()
        drop_gradients(model, sample)
        measured = measure_peak(run, resident=[model, sample.args, dict(sample.kwargs), batch])
    return measured.peak_bytes + prepared.optimizer.state_bytes
