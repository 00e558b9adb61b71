"""Compare a planned step with the eager one, inside the memory that the plan has.

Note [Three ways]
    Where the eager step fits the budget, it runs as it is. Where it does not, its saved tensors are kept in a file: the
    same operators run on the same bits, so all they make is compared. Where a single operator needs more than the
    budget, which a plan may run in slices or in place, a part of the batch is compared, by the decisions of the same
    plan; of the whole batch the forward pass is compared, if that fits. What eager steps make is kept in the
    file too, because it would have to live beside the planned step.

Note [Left to chance]
    Some operators of a GPU add up in the order in which their threads come. Two eager steps then differ. So where a
    planned step differs a second eager step is run, and what that makes differently says nothing of the plan: it is
    left out, and named.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from memfit.api import apply
from memfit.capture.rehearse import Result, forward_with_results, with_results
from memfit.capture.sample import Sample
from memfit.capture.spilled import OverRoom, SpillFile, dropped_activations, lasting_tensors, spilled_activations
from memfit.describe import device_of
from memfit.errors import ExecutionError
from memfit.execute.attach import attach, remove
from memfit.measure.available import available
from memfit.measure.peak import held_bytes
from memfit.plan.plan import Plan
from memfit.plan.spilled import SpilledPeak
from memfit.prove.batch_part import PartOfBatch, parts_of_batch
from memfit.prove.comparison import (
    PARTS,
    Comparison,
    StoredResult,
    Undecided,
    compared,
    stored,
    undecided_in,
)
from memfit.prove.spilled_step import predicted_step
from memfit.tensors import storage_bytes
from memfit.units import format_bytes

AS_IT_IS = "the eager step was run as it is"
_FREE_SHARE = 0.9  # of the memory that is free: what an eager step may take of it
_FORWARD_PARTS = tuple(part for part in PARTS if part != "gradients")

_T = TypeVar("_T")
Outcome = tuple[tuple[Comparison, ...], str]


class EagerComparison:
    """One comparison of a planned step with the eager one, see Note [Three ways]."""

    def __init__(self, model: nn.Module, plan: Plan, example: Sample, seed: int) -> None:
        self._model, self._plan, self._example, self._seed = model, plan, example, seed
        self._resident_bytes = held_bytes([model, example.args, dict(example.kwargs)])
        self._limit_bytes = self._least_limit_bytes()
        self._spilled: SpilledPeak | None = None  # of a plan in regions nothing is known

    def run(self) -> Outcome:
        """Compare in the first way that fits; what was done is the second item."""
        if self._plan.unplanned_peak_bytes - self._plan.optimizer_state_bytes <= self._limit_bytes:
            return self._whole(AS_IT_IS, spills=False)
        if self._plan.step is not None:
            eager = self._plan.step
            self._spilled = predicted_step(self._model, self._example, eager.eager, eager.eager_workspace_bytes)
        if self._spilled is None or self._spilled.peak_bytes <= self._limit_bytes:
            try:
                return self._whole(self._misfit(), spills=True)
            except OverRoom as error:
                return self._by_part(str(error))
        needed = format_bytes(self._spilled.peak_bytes)
        return self._by_part(f"it takes {needed} even with its saved tensors in a file")

    def _least_limit_bytes(self) -> int:
        """Return the limit of a step: the budget, if that much is free; gradients of an earlier step stay in place."""
        free_bytes = int(_FREE_SHARE * available(device_of(self._model)).free_bytes)
        limits = [self._resident_bytes + free_bytes]
        if self._plan.budget_bytes is not None:
            gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
            limits.append(self._plan.budget_bytes - self._plan.optimizer_state_bytes - storage_bytes(gradients))
        return min(limits)

    def _misfit(self) -> str:
        return f"the eager step does not fit {format_bytes(self._limit_bytes)}"

    def _whole(self, how: str, *, spills: bool) -> Outcome:
        """Compare all of both steps."""
        with SpillFile(expected_bytes=self._expected_bytes(spills=spills)) as file:
            with self._spilling(file, self._example) if spills else contextlib.nullcontext():
                eager = self._eager_step(file, self._example)
            if spills:
                how += f": its saved tensors were kept in a file of {format_bytes(file.size_bytes)}"
            return self._told_apart(file, eager, how, spills=spills)

    def _told_apart(self, file: SpillFile, eager: StoredResult, how: str, *, spills: bool) -> Outcome:
        """Compare the planned step, see Note [Left to chance]."""
        comparisons = self._planned_step(file, eager)
        if all(each.equal == each.compared for each in comparisons):
            return comparisons, how
        with self._spilling(file, self._example) if spills else contextlib.nullcontext():
            undecided = self._step(file, self._example, lambda again: undecided_in(eager, again))
        names = sorted(name for found in undecided.values() for name in found)
        if not names:
            return comparisons, how
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        how += f"; left out is what two eager steps make differently, {len(names)} tensors: {shown}"
        return self._planned_step(file, eager, undecided=undecided), how

    def _by_part(self, reason: str) -> Outcome:
        """Compare a part of the batch, and of all of it what the forward pass makes."""
        if self._plan.regions:
            raise ExecutionError(f"{self._misfit()}: {reason}; check the plan where there is more memory")
        part = self._largest_part(reason)
        with SpillFile(expected_bytes=self._expected_bytes(spills=True)) as file:
            with self._spilling(file, part.sample):
                eager = self._eager_step(file, part.sample)
            comparisons = self._planned_part(file, part, eager)
            of_all, left_out = self._forward_of_all(file, part)
        how = f"compared at {part.rows} of {part.all_rows} samples, because {self._misfit()}: {reason}; {left_out}"
        return (*comparisons, *of_all), how

    def _largest_part(self, reason: str) -> PartOfBatch:
        refused = ""
        for part in parts_of_batch(self._model, self._plan, self._example, self._limit_bytes):
            if part.call is not None:
                return part
            refused = f"; {part.rows} of {part.all_rows} samples: {part.refused}"
        raise ExecutionError(
            f"{self._misfit()}: {reason}; no part of the batch can be compared in its stead{refused}; check the plan "
            "where there is more memory"
        )

    def _forward_of_all(self, file: SpillFile, part: PartOfBatch) -> tuple[tuple[Comparison, ...], str]:
        """Compare what the forward pass makes of the whole batch, if that fits; the second item says what was not."""
        not_compared = f"nothing was compared of all {part.all_rows} samples, whose eager forward pass does not fit"
        if self._spilled is None or self._spilled.forward_bytes > self._limit_bytes:
            return (), not_compared
        try:
            with dropped_activations(lasting_tensors(self._model, self._example), room_bytes=self._room_bytes()):
                eager = forward_with_results(
                    self._model,
                    self._example,
                    functools.partial(stored, file),
                    seed=self._seed,
                    backward_from=self._plan.backward_from,
                    keep=file.keep,
                )
        except OverRoom:
            return (), not_compared
        found = self._planned_step(file, eager, parts=_FORWARD_PARTS)
        named = tuple(_of_all(each, part.all_rows) for each in found)
        return named, f"gradients of all {part.all_rows} samples were not compared"

    def _eager_step(self, file: SpillFile, sample: Sample) -> StoredResult:
        return self._step(file, sample, functools.partial(stored, file))

    def _planned_step(
        self,
        file: SpillFile,
        eager: StoredResult,
        parts: tuple[str, ...] = PARTS,
        undecided: Undecided | None = None,
    ) -> tuple[Comparison, ...]:
        apply(self._plan, self._model, self._example)
        try:
            return self._step(file, self._example, lambda made: compared(eager, made, parts, undecided))
        finally:
            remove(self._model)

    def _planned_part(self, file: SpillFile, part: PartOfBatch, eager: StoredResult) -> tuple[Comparison, ...]:
        """Run the plan's decisions on a part of the batch."""
        attach(self._model, lambda *_: part.planned_call())
        try:
            return self._step(file, part.sample, lambda made: compared(eager, made))
        finally:
            remove(self._model)

    def _step(self, file: SpillFile, sample: Sample, use: Callable[[Result], _T]) -> _T:
        backward_from = self._plan.backward_from
        return with_results(self._model, sample, use, seed=self._seed, backward_from=backward_from, keep=file.keep)

    def _spilling(self, file: SpillFile, sample: Sample) -> contextlib.AbstractContextManager[SpillFile]:
        return spilled_activations(lasting_tensors(self._model, sample), file=file, room_bytes=self._room_bytes())

    def _room_bytes(self) -> int:
        """Return what values of a forward pass may take."""
        return max(0, self._limit_bytes - self._resident_bytes)

    def _expected_bytes(self, *, spills: bool) -> int:
        """Return what is put into the file: saved tensors, gradients, buffers before and after a step."""
        trained = [each for each in self._model.parameters() if each.requires_grad]
        results_bytes = storage_bytes(trained) + 2 * storage_bytes(list(self._model.buffers()))
        if not spills:
            return results_bytes
        if self._spilled is not None:
            return results_bytes + self._spilled.file_bytes
        return results_bytes + self._plan.unplanned_peak_bytes - self._plan.persistent_bytes


def _of_all(comparison: Comparison, rows: int) -> Comparison:
    return dataclasses.replace(comparison, part=f"{comparison.part} of all {rows} samples")
