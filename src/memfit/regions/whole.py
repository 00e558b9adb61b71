"""The step around the regions: what it takes as it is, and its live bytes where regions begin and end.

Note [Inside the budget]
    The eager step may be more than the budget, and than this machine has. So it is measured with its saved tensors in a
    file, which shows what it would take in memory, see Note [As if in memory] in `capture/spilled.py`. Where that is
    over the budget, all that follows runs in the same way: what modules are called with is noted in the file, operators
    of a region are timed in steps that fit, and the step around regions is measured with regions that fit. Steps whose
    tensors go through a file take too long to be timed: the step is said to take what operators of its regions do.
"""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memfit.capture.rehearse import drop_gradients, nothing_remains, step
from memfit.capture.sample import Sample
from memfit.capture.spilled import SpillFile, lasting_tensors, spilled_activations
from memfit.capture.with_loss import WithLoss
from memfit.describe import device_of, is_for_accelerator
from memfit.errors import CaptureError, MemfitError, first_line
from memfit.execute.attach import attach, remove
from memfit.ir import OptimizerMemory, Phase
from memfit.measure.available import available
from memfit.measure.optimizer import optimizer_memory
from memfit.measure.peak import held_bytes
from memfit.measure.stretches import MeasuredStretch, measure_stretches
from memfit.plan.identity import identity_program
from memfit.plan.regions import Footprint, Stretch, Surroundings, footprint
from memfit.prepare import with_beside
from memfit.recipe import Recipe, budget_bytes
from memfit.regions.find import Region
from memfit.regions.marked import BEGIN

_TIMED_STEPS = 3
_FREE_SHARE = 0.9  # of the memory that is free: what steps that are run to plan may take of it
_MEASURED_STEPS = 5  # releases by threads of a process group are missed now and then


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagerStep:
    """One step as the model itself runs it."""

    peak_bytes: int | None  # with the optimizer's state and step; None: it was not run, and is predicted
    persistent_bytes: int  # live when the step ends, with the optimizer's state
    resident_bytes: int  # before the step
    step_us: float | None  # None: it does not fit and was not timed
    optimizer: OptimizerMemory


def eager_step(model: nn.Module, sample: Sample, recipe: Recipe) -> EagerStep:
    """Measure an eager step, and time it where it fits the budget and what is free, see Note [Inside the budget]."""
    eager = measured_step(model, sample, recipe)
    return eager if limit_of(eager, recipe, device_of(model)) is not None else _timed(eager, model, sample, recipe)


def measured_step(model: nn.Module, sample: Sample, recipe: Recipe) -> EagerStep:
    """Measure an eager step that keeps its saved tensors in a file; the model stays as it is."""
    with spilling(model, sample), torch.enable_grad():
        measured = measure_stretches(_run(model, sample, recipe), resident=_resident(model, sample, recipe))
        optimizer = _optimizer_memory(model, recipe)
    end_bytes = measured[-1].end_bytes + optimizer.state_bytes
    peak_bytes = max(each.peak_bytes for each in measured) + optimizer.state_bytes
    return EagerStep(
        peak_bytes=max(peak_bytes, end_bytes + optimizer.workspace_bytes),
        persistent_bytes=end_bytes,
        resident_bytes=measured[0].start_bytes,
        step_us=None,
        optimizer=optimizer,
    )


def limit_of(eager: EagerStep, recipe: Recipe, device: str) -> int | None:
    """Return what steps that are run to plan may take in memory; None if the eager step itself may be run."""
    assert eager.peak_bytes is not None
    step_bytes = eager.peak_bytes - eager.optimizer.state_bytes
    limit_bytes = eager.resident_bytes + int(_FREE_SHARE * available(device).free_bytes)
    if recipe.budget != "smallest":  # how much that is is not known before there are plans
        budget = budget_bytes(recipe.budget, eager.peak_bytes) - eager.optimizer.state_bytes
        limit_bytes = min(limit_bytes, budget)
    return limit_bytes if step_bytes > limit_bytes else None


@contextlib.contextmanager
def spilling(model: nn.Module, sample: Sample) -> Iterator[None]:
    """Keep saved tensors in a file meanwhile, and put the model back at the end."""
    with (
        SpillFile() as file,
        nothing_remains(model, sample, keep=file.keep),
        spilled_activations(lasting_tensors(model, sample), file=file),
    ):
        yield


def _timed(eager: EagerStep, model: nn.Module, sample: Sample, recipe: Recipe) -> EagerStep:
    run = _run(model, sample, recipe)
    with nothing_remains(model, sample), torch.enable_grad():
        step_us = min(_microseconds(run) for _ in range(_TIMED_STEPS))
    return dataclasses.replace(eager, step_us=step_us)


def baseline_step(
    model: nn.Module, sample: Sample, recipe: Recipe, regions: Sequence[Region]
) -> tuple[EagerStep, list[Stretch]]:
    """What is known of the eager step from one with every region at its baseline, where it is not to be run itself."""
    run = _run(model, sample, recipe)
    with nothing_remains(model, sample), torch.enable_grad(), _attached(model, regions):
        step_us = min(_microseconds(run) for _ in range(_TIMED_STEPS))
        optimizer = _optimizer_memory(model, recipe)
        resident = _resident(model, sample, recipe)
        runs = [_measured(resident, regions, run, optimizer) for _ in range(_MEASURED_STEPS)]
        stretches = _lowest(runs)
        end_bytes = stretches[-1].live_bytes - optimizer.workspace_bytes
        drop_gradients(model, sample)
        resident_bytes = held_bytes(resident)
    again_us = sum(region.calls * region.kind.baseline_us for region in regions)
    eager = EagerStep(
        peak_bytes=None,
        persistent_bytes=end_bytes,
        resident_bytes=resident_bytes,
        step_us=max(step_us - again_us, step_us / 2),  # a forward pass again is less than the rest
        optimizer=optimizer,
    )
    return eager, stretches


def stretches_of(
    model: nn.Module,
    sample: Sample,
    recipe: Recipe,
    regions: Sequence[Region],
    optimizer: OptimizerMemory,
    *,
    spills: bool = False,
) -> list[Stretch]:
    """Run a step with every region at its baseline, and measure it from mark to mark.

    With `spills` its saved tensors are in a file; what is measured is the step as it is with them in memory.
    """
    run = _run(model, sample, recipe)
    around = spilling(model, sample) if spills else nothing_remains(model, sample)
    with around, torch.enable_grad(), _attached(model, regions):
        run()
        return _measured(_resident(model, sample, recipe), regions, run, optimizer)


def _lowest(runs: Sequence[list[Stretch]]) -> list[Stretch]:
    """The same step, measured several times: a release that was not seen makes all that follows higher, never lower."""
    marks = [[(each.waiting, each.running) for each in run] for run in runs]
    if any(each != marks[0] for each in marks):
        return min(runs, key=_peak_bytes)
    return [min(same, key=lambda each: each.live_bytes) for same in zip(*runs, strict=True)]


@contextlib.contextmanager
def _attached(model: nn.Module, regions: Sequence[Region]) -> Iterator[None]:
    """Let every region run its baseline for a while."""
    for region in regions:
        attach(region.module, _always(region), whole=model)
    try:
        yield
    finally:
        remove(model)


def _measured(
    resident: Sequence[Any], regions: Sequence[Region], run: Callable[[], None], optimizer: OptimizerMemory
) -> list[Stretch]:
    for region in regions:
        region.marked.forget()
    for parameter in (each for holder in resident if isinstance(holder, nn.Module) for each in holder.parameters()):
        parameter.grad = None  # an accelerator would give those of the run before back while it is measured
    measured = measure_stretches(run, resident=resident)
    baselines = [region_footprint(region, region.marked.surroundings()) for region in regions]
    return _stretches(measured, baselines, optimizer)


def region_footprint(region: Region, around: Surroundings, program: Any = None) -> Footprint:
    """What a program of a region adds to the step around it; without one, the baseline."""
    prepared = region.kind.prepared
    return footprint(
        prepared.graph,
        program or region.kind.baseline,
        region.kind.baseline,
        workspace_bytes=prepared.costs.workspace_bytes,
        granularity_bytes=prepared.granularity_bytes,
        around=around,
    )


def eager_footprint(region: Region, around: Surroundings) -> Footprint:
    """What a region adds to the step around it if it runs eagerly, beside memfit."""
    prepared = region.kind.prepared
    if prepared.eager.storages != prepared.graph.storages:  # rewritten: what is captured stands for what was
        return region_footprint(region, around, region.kind.unplanned)
    return footprint(
        prepared.eager,
        identity_program(prepared.eager),
        region.kind.baseline,
        workspace_bytes=prepared.eager_workspace_bytes,
        granularity_bytes=prepared.granularity_bytes,
        around=around,
        baseline_graph=prepared.graph,
    )


def _run(model: nn.Module, sample: Sample, recipe: Recipe) -> Callable[[], None]:
    """A step, with the loss that the caller computes outside of the model if it is known."""
    subject, given = model, sample
    if recipe.loss is not None and recipe.loss.function is not None:
        subject, given = WithLoss(model, recipe.loss.function), Sample((recipe.loss.batch,))

    ran = 0

    def run() -> None:
        nonlocal ran
        try:
            step(subject, given, seed=recipe.seed, backward_from=recipe.backward_from)
        except Exception as error:
            if not ran or isinstance(error, MemfitError | MemoryError):
                raise
            raise CaptureError(
                f"a step of {type(model).__name__} runs once on the sample, but not again ({type(error).__name__}: "
                f"{first_line(error)}), so that it cannot be run to plan it: it keeps something from one step to the "
                "next; let the loop clear that, or keep it detached"
            ) from error
        ran += 1

    return run


def _resident(model: nn.Module, sample: Sample, recipe: Recipe) -> list[Any]:
    """Count the memory before a step."""
    batch = None if recipe.loss is None else recipe.loss.batch
    return [model, sample.args, dict(sample.kwargs), batch]


def _always(region: Region) -> Callable[..., Any]:
    return lambda *_: region.marked


def _stretches(
    measured: Sequence[MeasuredStretch], baselines: Sequence[Footprint], optimizer: OptimizerMemory
) -> list[Stretch]:
    """What the marks mean, see Note [Whole peak] in `plan/regions.py`."""
    waiting: Counter[int] = Counter()
    stretches = []
    for each in measured:
        running = None
        live_bytes = each.peak_bytes
        if each.label:
            number, name, end = each.label.split()
            region, phase = int(number), Phase(name)
            if end == BEGIN:
                running = (region, phase)
                expected_bytes = baselines[region].forward_bytes
                if phase is Phase.BACKWARD:
                    expected_bytes = baselines[region].backward_bytes
                    waiting[region] -= 1
                # What the pass took beyond its program stays with it, whatever it runs.
                live_bytes = each.start_bytes + max(0, each.peak_bytes - each.start_bytes - expected_bytes)
            elif phase is Phase.FORWARD:
                waiting[region] += 1
        kept = {region: count for region, count in waiting.items() if count}
        stretches.append(Stretch(live_bytes=live_bytes + optimizer.state_bytes, waiting=kept, running=running))
    end_bytes = measured[-1].end_bytes + optimizer.state_bytes + optimizer.workspace_bytes
    return [*stretches, Stretch(live_bytes=end_bytes, waiting={})]


def _optimizer_memory(model: nn.Module, recipe: Recipe) -> OptimizerMemory:
    """After a step: what the optimizer keeps and needs for what got a gradient, and what lives beside."""
    if recipe.optimizer is None:
        return with_beside(OptimizerMemory(), recipe)
    memory = optimizer_memory(
        recipe.optimizer,
        list(model.parameters()),
        for_cuda=is_for_accelerator(model, None),
        without_gradient=[parameter for parameter in model.parameters() if parameter.grad is None],
    )
    return with_beside(memory, recipe)


def _peak_bytes(stretches: Sequence[Stretch]) -> int:
    return max(stretch.live_bytes for stretch in stretches)


def _microseconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
