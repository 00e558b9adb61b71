"""Budgets of the whole process: what is free here, or a number of bytes, turned into a budget of allocated bytes.

Note [What counts]
    A process takes more than its tensors, see `measure/process.py`. What it may take for training is what is free, and
    what the model, the batch and the optimizer have taken already: these are part of the peak. Where `RLIMIT_DATA` is
    the tightest limit, mapped bytes count, else bytes in memory. On CUDA the context is there before the model, and
    the caching allocator's own rounding is part of what it hands out: there the two kinds of bytes are one.
"""

import dataclasses
import logging
from typing import Any

import torch
from torch import nn

from memfit.capture.sample import Sample
from memfit.describe import device_of
from memfit.errors import InvalidBudget
from memfit.ir import Program
from memfit.malloc import release_freed_memory
from memfit.measure.available import DATA, available
from memfit.measure.peak import held_bytes
from memfit.measure.process import ProcessPeak, can_be_measured, process_peak, runtime_memory
from memfit.prepare import Prepared
from memfit.recipe import Recipe
from memfit.units import format_bytes

log = logging.getLogger(__name__)

_PLANNING_BYTES = 32 * 2**20  # that planning leaves in the process: 9 to 25 MiB were seen on small models
_TO_SPARE = 0.03  # of what is free: other programs take and give meanwhile


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessLimit:
    """Limit what a process may take for training, with what it has taken for the model already."""

    limit_bytes: int
    counts_mapped: bool  # rather than what is in memory
    is_measured: bool  # whether the process takes more than its tensors, and how much can be measured
    set_aside_bytes: int = 0  # of what there is, for planning itself

    def to_ask_for(self, needed_bytes: int) -> int:
        """Return what `process=` has to be for a step that needs so much; in whole MiB, as it is said."""
        mib = 2**20
        return -(-(needed_bytes + self.set_aside_bytes) // mib) * mib

    def takes(self, peak: ProcessPeak) -> int:
        """The figure of a peak that the limit speaks of."""
        return peak.mapped_bytes if self.counts_mapped else peak.peak_bytes


def process_limit(recipe: Recipe, model: nn.Module, sample: Sample, optimizer: Any = None) -> ProcessLimit:
    """Read what there is, and say in one line what is taken.

    Freed memory is returned to the system from here on, where that is possible: predictions are for such a process.
    """
    if recipe.device is not None:
        raise InvalidBudget("what is available can be told of a device that is here; give bytes for another one")
    device = device_of(model)
    is_measured = can_be_measured(device) and release_freed_memory()
    found = available(device)
    held = held_bytes([model, sample.args, dict(sample.kwargs), *_states(optimizer), *_gradients(model)])
    limit_bytes = held + int((1 - _TO_SPARE) * found.free_bytes)
    said = f"{format_bytes(found.free_bytes)} free ({found.limit}) and {format_bytes(held)} in use by the model"
    if recipe.process_bytes is not None:
        if recipe.process_bytes > held + found.free_bytes:
            log.warning("a budget of %s is above what there is: %s", format_bytes(recipe.process_bytes), said)
        limit_bytes = min(recipe.process_bytes, held + found.free_bytes)
    set_aside_bytes = _PLANNING_BYTES if is_measured else 0
    limit_bytes = max(0, limit_bytes - set_aside_bytes)
    log.info("the process may take %s for training: %s", format_bytes(limit_bytes), said)
    return ProcessLimit(
        limit_bytes=limit_bytes,
        counts_mapped=found.limit == DATA,
        is_measured=is_measured,
        set_aside_bytes=set_aside_bytes,
    )


def peak_of_process(prepared: Prepared, program: Program, *, planned: bool) -> ProcessPeak:
    """Predict what the process takes for a program, or for the eager run if it is not a plan's."""
    if planned:
        graph, workspaces = prepared.graph, prepared.costs.workspace_bytes
    else:
        graph, workspaces = prepared.eager, list(prepared.eager_workspace_bytes)
    return process_peak(
        graph,
        program,
        workspace_bytes=workspaces,
        optimizer=prepared.optimizer,
        loss=prepared.loss,
        planned=planned,
    )


def plain_budget_bytes(limit: ProcessLimit) -> int:
    """A budget of allocated bytes for a step whose operators are not known yet: without what the runtime takes."""
    if not limit.is_measured:
        return limit.limit_bytes
    runtime = runtime_memory()
    runtime_bytes = runtime.planned_mapped_bytes if limit.counts_mapped else runtime.planned_bytes
    return max(0, int((1 - _TO_SPARE) * (limit.limit_bytes - runtime_bytes)))


def _states(optimizer: Any) -> list[Any]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else []


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]
