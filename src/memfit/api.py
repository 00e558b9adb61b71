"""What users call: capture, then simulate, then execute."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from memfit.alone import alone
from memfit.capture.diagnose import refusals_as_capture_errors
from memfit.capture.hooks import warn_of_hooks
from memfit.capture.sample import Sample, check_dense, check_initialized
from memfit.capture.with_loss import ModelCall, call_of_model, with_modes_of_now
from memfit.describe import device_of, is_for_cuda, model_digest
from memfit.errors import (
    CaptureError,
    InfeasibleBudget,
    InternalError,
    InvalidFile,
    InvalidInput,
    InvalidModel,
    MemfitError,
)
from memfit.estimate import Estimate
from memfit.execute.attach import attach, planned_forward, remove, removed
from memfit.internal import in_sentences, internal_errors
from memfit.layout import with_layout
from memfit.measure.available import available
from memfit.measure.devices import find_device
from memfit.measure.optimizer import OptimizerLike, check_optimizer
from memfit.measure.peak import held_bytes
from memfit.pipeline import StepPlanner, frontier_recipes, recipe_of
from memfit.plan.frontier import Frontier
from memfit.plan.loop import Loop
from memfit.plan.plan import Plan, not_counted
from memfit.plan.select import Selection
from memfit.plan.solve import Found, Report
from memfit.prepare import prepare, traced_for
from memfit.process_budget import plain_budget_bytes, process_limit
from memfit.progress import ProgressLike, ProgressLine, progress_line
from memfit.recipe import (
    AVAILABLE,
    DEVICE,
    EXACT,
    Budget,
    OutsideLoss,
    Recipe,
    budget_bytes,
    check_fractions,
    is_fraction,
    with_kernels,
    without_channels_last,
)
from memfit.regions.estimate import measured_estimate
from memfit.regions.planner import could_be_in_regions, make_region_planner, plan_by_regions
from memfit.regions.run import RegionRunner, apply_regions, plan_in_regions
from memfit.runner import Runner
from memfit.tensors import storage_bytes
from memfit.units import format_bytes, parse_bytes
from memfit.unplanned import Loss, parameter_counts, unplanned_step
from memfit.ways import best_way

log = logging.getLogger(__name__)

_FOR_THIS_SAMPLE = (
    'budget="smallest" is the least that this sample needs: longer batches and other kinds of calls need more and are '
    "refused when they come; give the longest sample, or a budget in bytes"
)

Selections = Selection | Sequence[Selection]


@in_sentences("estimating a step of")
def estimate(
    model: nn.Module,
    sample: Any,
    *,
    optimizer: OptimizerLike | None = None,
    loss: Loss | None = None,
    device: str | None = None,
    measure: bool | None = None,
    process: bool = False,
    backward_from: str = "auto",
    loop: Loop | None = None,
    progress: ProgressLike = None,
) -> Estimate:
    """Predict the peak memory of one training step; the model is not run, unless it cannot be traced.

    `sample` is what the model's forward takes: a tensor, a tuple, a dict or a `Sample`. With
    `loss(model, sample)` the step computes that loss; without, gradients start at the model's
    own loss if it returns one, else at its outputs. `optimizer` is a name in `torch.optim`, an
    instance or a factory; without, forward and backward are estimated. `device` names a device
    that need not be here ("A100-40GB"). `measure=False` leaves out what operators allocate
    inside, which otherwise each distinct operator is run once for; by default that is done where the model has
    weights, and without where it does not take long. `process=True` adds the peak of the process, on a CPU; operators
    are measured for it in processes of their own, for half a minute the first time. `loop` tells what lives from one
    step to the next, see `memfit.Loop`. `progress` is as for `plan`.
    A model that cannot be traced whole is run for one step, with its saved tensors in a file; a note says so.
    """
    _check_model(model)
    with alone(), progress_line(progress, "tracing a training step") as line:
        try:
            with internal_errors(f"estimating a step of {type(model).__name__}"):
                step = unplanned_step(
                    model,
                    sample,
                    optimizer=optimizer,
                    loss=loss,
                    device=device,
                    measure=measure,
                    backward_from=backward_from,
                    progress=line.measured,
                    loop=loop,
                )
        except CaptureError as error:
            if measure is False or process or device is not None:
                raise
            line.doing("measuring a training step")
            return _estimate_of_run(model, sample, optimizer, loss, backward_from, error)
        return step.estimate(process=process)


def _estimate_of_run(
    model: nn.Module,
    sample: Any,
    optimizer: OptimizerLike | None,
    loss: Loss | None,
    backward_from: str,
    error: CaptureError,
) -> Estimate:
    """From a step that is run, where it could not be traced; the error, where it cannot be run either."""
    outside = _outside(loss, sample)
    recipe = Recipe(budget="smallest", optimizer=optimizer, loss=outside, backward_from=backward_from)
    try:
        call = _call(model, sample, loss)
        with removed(model), call.modes():
            if could_be_in_regions(model, call.sample, recipe):
                return measured_estimate(model, call.sample, recipe, parameter_counts(model), error)
    except MemfitError:
        raise
    except Exception as failure:  # of the model's own code, or of the loss's
        raise error from failure
    raise error


@in_sentences("planning a step of")
def plan(
    model: nn.Module,
    sample: Any,
    *,
    budget: Budget = None,
    process: int | str | None = None,
    reserved: int | str | None = None,
    optimizer: OptimizerLike | None = None,
    loss: Loss | None = None,
    loop: Loop | None = None,
    allow: Sequence[str] = EXACT,
    recompute: Selections = (),
    keep: Selections = (),
    kernels: str = "eager",
    device: str | None = None,
    outputs: str = "all",
    backward_from: str = "auto",
    time_limit: float = 6.0,
    report: Report | None = None,
    progress: ProgressLike = None,
) -> Plan:
    """Find the fastest way to run a training step under a budget; the model is not changed.

    `budget` is bytes, "6GiB", a fraction of the unplanned peak (0.5), "smallest", or "available": what is free here, of
    the device and the process. It means the peak of allocated bytes over one training step; with an `optimizer` its
    state and step are part of it. `loss(model, sample)` is what your loop computes outside of the model, as for
    `estimate`: the model's own forward is planned, beside what the loss takes. What your loop holds beyond that, return
    beside the loss: `return loss, logits`. `loop=memfit.Loop(gradients="kept")` counts gradients that are there when a
    step begins, as where they are accumulated. `process` is a budget of the whole process instead, with all it takes
    beside tensors. Planning itself allocates no more than the budget.
    `reserved` is a budget of what CUDA's caching allocator reserves instead, by simulation and for a CUDA device;
    `budget="device"` means the memory of the named `device` beside its context, reserved.
    `allow` names the techniques (`memfit.TECHNIQUES`); `recompute` and `keep` name modules by type, by name
    pattern, or by a number of blocks, whose values must or must not be computed again. `outputs="loss"` drops
    every output beside the loss. `kernels="inductor"` compiles neighbouring operators into one kernel, which rounds
    differently and computes again what it needs nearly for free; where eager kernels are predicted to do better under
    the budget, these are taken. `device` plans for a device that is not here, by estimated times. `time_limit` is in
    seconds, for a search; `report` is called with the best so far. What takes over a second is said in one line on the
    terminal, or in the log of "memfit"; `progress=False` is silent, and a function `progress(done, total)` is told
    instead how many operators are measured. A model that cannot be captured whole is run for a few steps and planned
    region by region (docs/planning.md).
    """
    _check_model(model)
    recipe = _recipe(
        **_budgets(budget, process, reserved),
        optimizer=optimizer,
        loss=_outside(loss, sample),
        beside_bytes=_kept_gradient_bytes(model, loop),
        allow=allow,
        recompute=recompute,
        keep=keep,
        kernels=kernels,
        device=device,
        outputs=outputs,
        backward_from=backward_from,
        time_limit=time_limit,
        report=report,
    )
    if recipe.counts_reserved and not is_for_cuda(model, recipe.device):
        raise InvalidInput("reserved bytes are those of CUDA's caching allocator; name a CUDA device with device=")
    call = _call(model, sample, loss)
    with call.modes():
        return _plan(model, call.sample, recipe, progress)


def _plan(model: nn.Module, example: Sample, recipe: Recipe, progress: ProgressLike) -> Plan:
    """Plan whole, or region by region if the model cannot be captured whole."""
    check_dense(model, example)
    _say_if_above_what_is_free(recipe, model, example)
    with alone(), progress_line(progress, "tracing a training step") as line, removed(model):
        recipe = _told(recipe, line)
        try:
            return _said(_plan_whole(model, example, recipe), model)
        except CaptureError as error:
            line.doing("planning region by region")
            recipe = without_channels_last(recipe)
            recipe = _of_tensors(recipe, model, example)
            with refusals_as_capture_errors(type(model).__name__):
                return _said(plan_by_regions(model, example, recipe, error), model)


def _plan_whole(model: nn.Module, example: Sample, recipe: Recipe) -> Plan:
    recipe, unplanned = with_layout(model, example, recipe)

    def made(way: Recipe) -> Plan:
        doing = f"planning a step of {type(model).__name__}"
        with internal_errors(doing), traced_for(model, example, way) as joint:
            other = unplanned if way.channels_last else None
            prepared = prepare(model, joint, example, way, may_put_off=True, unplanned=other)
            return StepPlanner(model, joint, example, way, prepared).plan(way)

    return best_way(recipe, made, lambda plan: plan)


@in_sentences("applying a plan to")
def apply(plan: Plan, model: nn.Module, sample: Any = None) -> nn.Module:
    """Run the model by a plan; `remove` undoes it.

    The plan must have been made for this model: another is refused and the model stays as it is. With a
    `sample` the call is captured at once, otherwise when the first call comes. Calls of other shapes than
    the plan's are planned when they first come, under the same budget.
    """
    _check_trainable(model)
    _check_plan(plan, model)
    if plan.regions:
        with alone():
            return apply_regions(plan, model, None if sample is None else Sample.of(sample))
    runner = Runner(recipe=recipe_of(plan), plan=plan, only_the_plan=sample is not None)
    model = _attached(model, runner, None if sample is None else Sample.of(sample))
    runner.only_the_plan = False
    return model


@in_sentences("fitting")
def fit(
    model: nn.Module,
    sample: Any,
    budget: Budget = None,
    *,
    process: int | str | None = None,
    optimizer: OptimizerLike | None = None,
    loss: Loss | None = None,
    loop: Loop | None = None,
    allow: Sequence[str] = EXACT,
    recompute: Selections = (),
    keep: Selections = (),
    kernels: str = "eager",
    outputs: str = "all",
    backward_from: str = "auto",
    time_limit: float = 6.0,
    remember: bool = True,
    report: Report | None = None,
    progress: ProgressLike = None,
) -> nn.Module:
    """Plan and apply: train the model inside a budget. `remove` undoes it.

    The same module is returned: same class, same `state_dict` keys, same numbers bit for bit unless `allow`
    names a technique that says otherwise. Keywords are those of `plan`; a `loss` stays in your loop. Calls of another
    shape, dtype or mode than `sample` are captured and planned when they first come. Without a budget, and without
    `recompute`, the captured step runs unplanned. The plan is kept on disk, and a later run with the same model, sample
    and wishes on this machine takes it: no operator is measured and nothing is searched then. `remember=False` plans
    anew.
    """
    _check_trainable(model)
    recipe = _recipe(
        **_budgets(budget, process),
        optimizer=optimizer,
        loss=_outside(loss, sample),
        beside_bytes=_kept_gradient_bytes(model, loop),
        allow=allow,
        recompute=recompute,
        keep=keep,
        kernels=kernels,
        device=None,
        outputs=outputs,
        backward_from=backward_from,
        time_limit=time_limit,
        remember=remember,
        report=report,
    )
    call = _call(model, sample, loss)
    if not recipe.is_unplanned:
        warn_of_hooks(model)
    with call.modes():
        fitted = _fit_or_leave(recipe, model, call.sample, progress)
    plan = plan_of(fitted)
    if plan is not None:
        _said(plan, model)
    if budget == "smallest":
        log.info("%s", _FOR_THIS_SAMPLE)
    return fitted


def _fit_or_leave(recipe: Recipe, model: nn.Module, example: Sample, progress: ProgressLike) -> nn.Module:
    """Plan and apply; a model of which nothing can be planned is left as it is where its step fits the budget."""
    try:
        return fit_by(recipe, model, example, progress)
    except CaptureError as error:
        _leave(recipe, model, example, error)
        return remove(model)


def _leave(recipe: Recipe, model: nn.Module, example: Sample, error: CaptureError) -> None:
    """Warn that a model of which nothing can be planned is left as it is; refuse it where that is over the budget."""
    step_bytes = error.unplanned_bytes
    if step_bytes is None:
        raise error
    budget = _of_tensors(recipe, model, example).budget
    if budget != "smallest" and step_bytes > (limit_bytes := budget_bytes(budget, step_bytes)):
        if isinstance(error, InternalError):  # which says nothing of what is possible
            raise error
        raise InfeasibleBudget(
            f"a step takes {format_bytes(step_bytes)} as it is, {format_bytes(limit_bytes)} were given, and nothing of "
            f"the model can be planned to take less; give a bigger budget, or a smaller batch: {error}",
            smallest_bytes=step_bytes,
            floor_bytes=step_bytes,
            operation="a step as it is",
        ) from error
    warnings.warn(
        f"this model is left as it is, a step of which takes {format_bytes(step_bytes)} of this sample and fits the "
        f"budget; nothing of it can be planned: {error}",
        stacklevel=5,
    )


def fit_by(recipe: Recipe, model: nn.Module, example: Sample, progress: ProgressLike = None) -> nn.Module:
    """Plan and apply by a recipe: whole, or region by region if the model cannot be captured whole."""
    check_dense(model, example)
    _say_if_above_what_is_free(recipe, model, example)
    with alone(), progress_line(progress, "tracing a training step") as line:
        recipe = _told(recipe, line)
        try:
            return _attached(model, Runner(recipe=recipe, in_regions=_later_in_regions), example)
        except CaptureError as error:
            line.doing("planning region by region")
            fitted = _fit_regions(recipe, model, example, error)
            if isinstance(error, InternalError):
                warnings.warn(f"this model is planned region by region: {error}", stacklevel=4)
            return fitted


def _fit_regions(recipe: Recipe, model: nn.Module, example: Sample, error: CaptureError) -> nn.Module:
    recipe = _of_tensors(without_channels_last(_with_known_loss(recipe)), model, example)
    with removed(model), refusals_as_capture_errors(type(model).__name__):
        plan = plan_by_regions(model, example, recipe, error)
    return apply_regions(plan, model, example)


def _later_in_regions(recipe: Recipe, model: nn.Module, example: Sample, error: CaptureError) -> None:
    """Go on in regions with a model that was captured whole before, or leave such calls to its own forward."""
    try:
        _fit_regions(recipe, model, example, error)
    except InfeasibleBudget as reason:
        raise reason.after(str(error)) from reason
    except CaptureError as reason:
        _leave(recipe, model, example, reason)
    else:
        warnings.warn(f"from now on this model runs region by region: {error}", stacklevel=2)


def _with_known_loss(recipe: Recipe) -> Recipe:
    """The same where a step can be run without the loss: what is known of it counts all along."""
    loss = recipe.loss
    if loss is None or loss.memory is None:
        return recipe
    loss_bytes = loss.memory.working_bytes + loss.memory.batch_bytes
    return dataclasses.replace(recipe, loss=None, beside_bytes=recipe.beside_bytes + loss_bytes)


def _outside(loss: Loss | None, batch: Any) -> OutsideLoss | None:
    """Return the loss that a caller gives for a batch; None if there is none."""
    return None if loss is None else OutsideLoss(function=with_modes_of_now(loss), batch=batch)


def _call(model: nn.Module, sample: Any, loss: Loss | None) -> ModelCall:
    """Return the model's call: of the sample itself, or the one that a loss makes of it."""
    check_initialized(model)
    if loss is None:
        return ModelCall(Sample.of(sample))
    with removed(model), torch.enable_grad():
        return call_of_model(model, loss, sample)


def _said(plan: Plan, model: nn.Module) -> Plan:
    """Say in one line what a plan does not count, if there is something."""
    trained = [each for each in model.parameters() if each.requires_grad]
    left_out = not_counted(plan, 2 * storage_bytes(trained))
    if left_out:
        log.info("%s", left_out)
    return plan


def _kept_gradient_bytes(model: nn.Module, loop: Loop | None) -> int:
    """Count what a loop keeps beside a step: a captured backward pass makes a whole set of gradients anew."""
    if not isinstance(loop, Loop | None):
        raise InvalidInput(f'loop is a memfit.Loop, {loop!r} was given; write loop=memfit.Loop(gradients="kept")')
    if loop is not None and loop.outputs == "kept":
        raise InvalidInput(
            "a plan does not count outputs that a loop keeps; `del` them before the next step, or write "
            'outputs="none" and leave room for them in the budget'
        )
    if loop is None or loop.gradients == "none":
        return 0
    return storage_bytes([each for each in model.parameters() if each.requires_grad])


def _told(recipe: Recipe, line: ProgressLine) -> Recipe:
    """The same recipe, whose stages are told to a line."""
    given = recipe.report

    def found(state: Found) -> None:
        line.found(state)
        if given is not None:
            given(state)

    return dataclasses.replace(recipe, report=found, progress=line.measured, report_stage=line.doing)


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that a fitted model runs by; None if it runs unplanned."""
    runner = getattr(planned_forward(model), "compile_call", None)
    return runner.plan if isinstance(runner, Runner | RegionRunner) else plan_in_regions(model)


@in_sentences("planning steps of")
def frontier(
    model: nn.Module,
    sample: Any,
    *,
    fractions: Sequence[float] = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1),
    optimizer: OptimizerLike | None = None,
    allow: Sequence[str] = EXACT,
    recompute: Selections = (),
    keep: Selections = (),
    kernels: str = "eager",
    device: str | None = None,
    outputs: str = "all",
    backward_from: str = "auto",
    time_limit: float = 60.0,
    report: Callable[[Plan], None] | None = None,
    progress: ProgressLike = None,
) -> Frontier:
    """The whole curve of memory against time: plans at fractions of the activation part, and the smallest.

    The activation part is what the unplanned peak has beyond what lives when the step ends. One capture and one
    planner serve all points; `time_limit` is for all of them together. Ctrl-C gives the points found so far.
    """
    _check_model(model)
    check_fractions(fractions)
    recipe = _recipe(
        budget="smallest",
        optimizer=optimizer,
        allow=allow,
        recompute=recompute,
        keep=keep,
        kernels=kernels,
        device=device,
        outputs=outputs,
        backward_from=backward_from,
        time_limit=time_limit / (len(fractions) + 1),
    )
    recipe = without_channels_last(recipe)  # one layout for all points, and the lowest are in the model's own
    example = Sample.of(sample)
    with alone(), progress_line(progress, "tracing a training step") as line, removed(model):
        recipe = _told(recipe, line)
        report = _counted_points(line, len(fractions) + 1, report)
        try:
            doing = f"planning a step of {type(model).__name__}"
            with internal_errors(doing), traced_for(model, example, recipe) as joint:
                largest = dataclasses.replace(recipe, budget=float(max(fractions, default=1.0)))
                prepared = prepare(model, joint, example, largest, may_put_off=True)
                planning = StepPlanner(model, joint, example, recipe, prepared)
                return _curve(frontier_recipes(recipe, prepared, fractions), planning.plan, report)
        except CaptureError as error:
            regions = make_region_planner(model, example, recipe, error)
            return _curve(frontier_recipes(recipe, regions, fractions), regions.plan, report)


def _counted_points(line: ProgressLine, total: int, report: Callable[[Plan], None] | None) -> Callable[[Plan], None]:
    """A report of plans that tells a line how many there are."""
    done = 0

    def planned(plan: Plan) -> None:
        nonlocal done
        done += 1
        line.doing(f"planning the next budget {done}/{total}")
        if report is not None:
            report(plan)

    return planned


def _curve(points: Iterable[Recipe], make: Callable[[Recipe], Plan], report: Callable[[Plan], None] | None) -> Frontier:
    """One plan a point, where there is one."""
    plans = []
    for point in points:
        try:
            plans.append(make(point))
        except InfeasibleBudget:
            continue
        except KeyboardInterrupt:
            if not plans:
                raise
            return Frontier.of(plans, was_interrupted=True)
        if report is not None:
            report(plans[-1])
        if plans[-1].was_interrupted:
            return Frontier.of(plans, was_interrupted=True)
    return Frontier.of(plans)


def _attached(model: nn.Module, runner: Runner, example: Sample | None) -> nn.Module:
    planned = attach(model, runner)
    if example is None:
        return model
    try:
        planned.capture(example.args, dict(example.kwargs))
    except BaseException:
        remove(model)
        raise
    return model


def _recipe(
    *,
    allow: Sequence[str],
    recompute: Selections,
    keep: Selections,
    kernels: str,
    device: str | None,
    time_limit: float,
    **others: Any,
) -> Recipe:
    check_optimizer(others.get("optimizer"))
    if not isinstance(time_limit, int | float) or not time_limit >= 0:
        raise InvalidInput(f"a time limit is a number of seconds, {time_limit!r} was given")
    if others.get("budget") == DEVICE:
        others |= _budget_of_device(device)
    return Recipe(
        allow=with_kernels((allow,) if isinstance(allow, str) else tuple(allow), kernels),
        recompute=_selections(recompute),
        keep=_selections(keep),
        device=None if device is None else find_device(device),
        time_limit_s=time_limit,
        **others,
    )


def _budgets(budget: Budget, process: int | str | None, reserved: int | str | None = None) -> dict[str, Any]:
    """Read a budget of allocated bytes, of reserved ones, or of the process."""
    if isinstance(budget, str) and budget.strip().lower() in ("smallest", AVAILABLE, DEVICE):
        budget = budget.strip().lower()
    if reserved is not None:
        if budget is not None or process is not None:
            raise InvalidInput("reserved is a budget by itself; give allocated bytes, reserved ones, or the process's")
        return {"budget": parse_bytes(reserved), "counts_reserved": True}
    if process is None:
        return {"budget": budget}
    if budget is not None:
        raise InvalidInput("both budget and process are given; give allocated bytes, or those of the whole process")
    return {"budget": AVAILABLE, "process_bytes": parse_bytes(process)}


def _budget_of_device(device: str | None) -> dict[str, Any]:
    """Take what a device has beside its context; on CUDA it is compared with what the allocator reserves."""
    if device is None:
        raise InvalidInput('budget="device" means the memory of the device that is planned for; name it with device=')
    found = find_device(device)
    return {"budget": found.usable_bytes, "counts_reserved": found.is_cuda}


def _say_if_above_what_is_free(recipe: Recipe, model: nn.Module, example: Sample) -> None:
    """Say before anything is allocated that a budget in bytes is more than there is."""
    if recipe.device is not None or recipe.budget in (None, "smallest", AVAILABLE) or is_fraction(recipe.budget):
        return
    wanted_bytes = budget_bytes(recipe.budget, 0)
    there_bytes = held_bytes([model, example.args, dict(example.kwargs)]) + available(device_of(model)).free_bytes
    if wanted_bytes > there_bytes:
        log.warning(
            "a budget of %s is above what there is here, %s with what the model has taken; planning stays within that",
            format_bytes(wanted_bytes),
            format_bytes(there_bytes),
        )


def _of_tensors(recipe: Recipe, model: nn.Module, example: Sample) -> Recipe:
    """The same with a budget of allocated bytes, if it is one of the process: regions are measured one by one."""
    if not recipe.is_for_process:
        return recipe
    limit = process_limit(recipe, model, example, recipe.optimizer)
    return dataclasses.replace(recipe, budget=plain_budget_bytes(limit))


def _selections(given: Selections) -> tuple[Selection, ...]:
    return (given,) if isinstance(given, type | str | int) else tuple(given)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidModel(f"a torch.nn.Module was expected, a {type(model).__name__} was given")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise InvalidModel(
            "the model is inside DistributedDataParallel, whose own forward cannot be captured; give the model itself "
            "(model.module), or use memfit.distributed, which plans once for all ranks"
        )
    if torch.is_inference_mode_enabled():
        raise InvalidInput(
            "a training step cannot be traced under torch.inference_mode(), in which nothing is differentiated; call "
            "memfit outside of it"
        )


def _check_trainable(model: nn.Module) -> None:
    _check_model(model)
    if not model.training:
        raise InvalidModel(
            f"this {type(model).__name__} is in eval mode, in which its own forward runs; call model.train() first"
        )


def _check_plan(plan: Plan, model: nn.Module) -> None:
    """Refuse a plan of another model, by name of what differs."""
    if not isinstance(plan, Plan):
        raise InvalidInput(f"a Plan was expected, a {type(plan).__name__} was given; load one with memfit.Plan.load")
    if plan.model != type(model).__name__:
        raise InvalidFile(f"the plan was made for a {plan.model}, the model is a {type(model).__name__}; plan again")
    if plan.model_digest != model_digest(model):
        raise InvalidFile(
            f"the plan was made for a {plan.model} with other parameters or buffers (names, shapes, dtypes or which "
            "are trained differ); plan again"
        )
