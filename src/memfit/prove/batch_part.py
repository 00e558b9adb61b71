"""Parts of a batch that the decisions of a plan can be compared on, where the eager step of all of it does not fit."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memfit.capture.sample import Sample
from memfit.errors import MemfitError, first_line
from memfit.execute.compiled import CompiledCall
from memfit.pipeline import recipe_of
from memfit.plan.plan import Plan
from memfit.plan.validate import check_program
from memfit.prepare import Traced, planned_graph, prepare, traced_as_eager, traced_for
from memfit.prove.spilled_step import predicted_step
from memfit.runner import check_equal_to_eager
from memfit.trees import map_tensors
from memfit.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartOfBatch:
    """The first rows of a batch, and the planned call for them."""

    sample: Sample
    rows: int
    all_rows: int
    call: CompiledCall | None  # by the decisions of the plan; None: they cannot be compared here
    refused: str = ""  # why not

    def planned_call(self) -> CompiledCall:
        assert self.call is not None
        return self.call


def parts_of_batch(model: nn.Module, plan: Plan, sample: Sample, limit_bytes: int) -> Iterator[PartOfBatch]:
    """Yield a half of the batch, a quarter, and so on down to one row, see `first_rows`."""
    all_rows = _row_count(sample)
    rows = all_rows // 2
    while rows:
        part = first_rows(sample, rows)
        call, refused = None, ""
        try:
            call = _planned_call(model, plan, part, limit_bytes)
        except MemfitError as error:
            refused = first_line(error)
        yield PartOfBatch(sample=part, rows=rows, all_rows=all_rows, call=call, refused=refused)
        rows //= 2


def first_rows(sample: Sample, rows: int) -> Sample:
    """Cut every tensor that has as many rows as the first one; others stay as they are."""
    all_rows = _row_count(sample)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or len(tensor) != all_rows:
            return tensor
        return tensor.detach()[:rows].requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors(cut, (sample.args, dict(sample.kwargs)))
    return Sample(args, kwargs)


def _row_count(sample: Sample) -> int:
    return next((len(tensor) for tensor in sample.tensors() if tensor.dim()), 0)


class _DoesNotFit(MemfitError):
    """A part of the batch is still too big."""


def _planned_call(model: nn.Module, plan: Plan, part: Sample, limit_bytes: int) -> CompiledCall:
    """Capture a part of the batch and give it the decisions of a plan; raises where both steps cannot be compared."""
    recipe = recipe_of(plan)
    unplanned = traced_as_eager(model, part, recipe, with_hooks=False)
    with traced_for(model, part, recipe, with_hooks=False) as joint:
        check_equal_to_eager(type(model).__name__, joint, warn=False)
        before = Traced.of(joint)
        planned_graph(joint, recipe)
        options: dict[str, Any] = {"before": before, "unplanned": unplanned, "timed": False}
        prepared = prepare(model, joint, part, recipe, limit_bytes=limit_bytes, **options)
        check_program(prepared.graph, plan.program)
        call = CompiledCall(joint, prepared.graph, plan.program)
    eager = predicted_step(model, part, prepared.eager, prepared.eager_workspace_bytes)
    planned_bytes = prepared.peak_bytes(plan.program) - prepared.optimizer.state_bytes
    needed_bytes = max(eager.peak_bytes, planned_bytes)
    if needed_bytes > limit_bytes:
        raise _DoesNotFit(f"{format_bytes(needed_bytes)} are needed")
    return call
