"""The largest batch that fits a budget, by prediction: no step is run at a size that might not fit.

Note [Nearly linear]
    The peak of a step is a line over the batch size as long as it stands at the same operation: parameters and
    optimizer state do not grow, activations grow with every sample. Where it moves to another operation the line bends.
    So the size is found as a root is: a line through a size that fits and one that does not (or through two that fit)
    says where to look next, until the largest that fits and the next one up are both captured.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn

from memfit.capture.sample import Sample
from memfit.capture.with_loss import WithLoss
from memfit.errors import InfeasibleBudget, InvalidBudget, InvalidInput
from memfit.execute.attach import removed
from memfit.internal import in_sentences
from memfit.measure.optimizer import OptimizerLike, check_optimizer
from memfit.pipeline import make_planner
from memfit.plan.expand import program_of
from memfit.prepare import prepare, traced_for
from memfit.process_budget import plain_budget_bytes, process_limit
from memfit.recipe import AVAILABLE, Budget, Recipe, check_budget, without_channels_last
from memfit.step.batches import map_tensors, row_count
from memfit.step.losses import Loss, Mean
from memfit.units import format_bytes, parse_bytes

_BY_LINES = 10  # captures; a line needs a handful, and where it does not serve the middle is taken
_LARGEST = 2**20  # samples: nobody means a batch beyond
_SEARCH_S = 3.0


class MaxBatch(int):
    """A batch size, and what was predicted at it: use it as the number it is."""

    peak_bytes: int  # predicted at this size
    next_peak_bytes: int  # predicted at one sample more
    budget_bytes: int
    captures: int  # that it took

    def __new__(cls, size: int, *, peak_bytes: int, next_peak_bytes: int, budget_bytes: int, captures: int) -> Self:
        self = super().__new__(cls, size)
        self.peak_bytes = peak_bytes
        self.next_peak_bytes = next_peak_bytes
        self.budget_bytes = budget_bytes
        self.captures = captures
        return self

    def __repr__(self) -> str:
        return (
            f"{int(self)} samples: {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}, one more "
            f"would take {format_bytes(self.next_peak_bytes)}"
        )


@in_sentences("finding the largest batch of")
def max_batch(
    model: nn.Module,
    sample: Any,
    budget: Budget,
    *,
    optimizer: OptimizerLike | None = None,
    loss: Loss | None = None,
    allow: Sequence[str] = (),
) -> MaxBatch:
    """Find the largest batch whose training step fits a budget in bytes, without running one.

    `sample` is a batch of any size with the samples in the first axis of every tensor: what the model takes, or
    with a `loss(model, batch)` what that takes. With an `optimizer` its state and its step count too. The step is
    the plain one; `allow` names techniques (`memfit.TECHNIQUES`), and then it is the step of the smallest plan
    that `memfit.fit` finds with them.
    """
    check_budget(budget)
    if budget == AVAILABLE:
        budget = plain_budget_bytes(process_limit(Recipe(budget=AVAILABLE), model, Sample(()), optimizer))
    if budget is None or budget == "smallest" or (isinstance(budget, float) and budget <= 1):
        raise InvalidBudget(f'max_batch needs a number of bytes, for example "6GiB"; {budget!r} was given')
    check_optimizer(optimizer)
    if isinstance(sample, Sample):
        raise InvalidInput("max_batch needs the batch itself; give a tensor, a tuple or a dict of tensors")
    rows, subject = row_count(sample), model if loss is None else _Scalar(model, loss)
    limit_bytes = parse_bytes(budget)
    peak_of = _Peaks(subject, sample, rows, optimizer, tuple(allow), wrapped=loss is not None, limit_bytes=limit_bytes)
    return _largest(peak_of, limit_bytes, rows)


class _Scalar(WithLoss):
    """A loss that may return a mean that is not divided yet."""

    def forward(self, batch: Any) -> Any:
        returned = super().forward(batch)
        if isinstance(returned, tuple) and len(returned) == 2:
            returned = returned[0]
        return returned.sum if isinstance(returned, Mean) else returned


class _Peaks:
    """Predicted peaks by batch size."""

    def __init__(
        self,
        subject: nn.Module,
        sample: Any,
        rows: int,
        optimizer: OptimizerLike | None,
        allow: tuple[str, ...],
        *,
        wrapped: bool,
        limit_bytes: int,  # that no probe exceeds
    ) -> None:
        self._limit_bytes = limit_bytes
        self._subject = subject
        self._sample = sample
        self._rows = rows
        self._optimizer = optimizer
        self._allow = allow
        self._wrapped = wrapped
        self.known: dict[int, int] = {}

    def __call__(self, size: int) -> int:
        if size not in self.known:
            batch = map_tensors(lambda tensor: _resized(tensor, self._rows, size), self._sample)
            sample = Sample((batch,)) if self._wrapped else Sample.of(batch)
            self.known[size] = self._planned(sample) if self._allow else self._plain(sample)
        return self.known[size]

    def _plain(self, sample: Sample) -> int:
        recipe = Recipe(optimizer=self._optimizer)
        with removed(self._subject), traced_for(self._subject, sample, recipe) as joint:
            return prepare(
                self._subject, joint, sample, recipe, timed=False, limit_bytes=self._limit_bytes
            ).unplanned_peak_bytes

    def _planned(self, sample: Sample) -> int:
        recipe = without_channels_last(Recipe(optimizer=self._optimizer, allow=self._allow))
        with removed(self._subject), traced_for(self._subject, sample, recipe) as joint:
            prepared = prepare(self._subject, joint, sample, recipe, timed=False, limit_bytes=self._limit_bytes)
        planner = make_planner(self._subject, prepared, recipe)
        lowest = planner.smallest(time_limit_s=_SEARCH_S)
        planned_bytes = prepared.peak_bytes(program_of(planner.problem, lowest.expansion))
        return min(planned_bytes, prepared.unplanned_peak_bytes)


def _largest(peak_of: _Peaks, budget_bytes: int, start: int) -> MaxBatch:
    fits, over = 0, None  # the largest size known to fit, the smallest known not to
    size = start
    while over is None or over - fits > 1:
        if peak_of(size) <= budget_bytes:
            fits = size
            if size >= _LARGEST:
                raise InvalidInput(
                    f"a batch of {size:,} samples still fits {format_bytes(budget_bytes)}: the peak does not grow with "
                    "the first axis of the sample; check that it is the batch"
                )
        else:
            over = size
        if over == 1:
            raise InfeasibleBudget(
                f"one sample needs {format_bytes(peak_of(1))}, more than the {format_bytes(budget_bytes)} there are; "
                'give a bigger budget, or allow=("recompute", "lean")',
                smallest_bytes=peak_of(1),
            )
        size = _next_size(peak_of.known, budget_bytes, fits, over)
    assert over is not None
    return MaxBatch(
        fits,
        peak_bytes=peak_of(fits),
        next_peak_bytes=peak_of(over),
        budget_bytes=budget_bytes,
        captures=len(peak_of.known),
    )


def _next_size(peaks: dict[int, int], budget_bytes: int, fits: int, over: int | None) -> int:
    """Where a line through what is known meets the budget, between what fits and what does not."""
    if len(peaks) == 1:
        (only,) = peaks
        return max(1, only // 2) if over is not None else 2 * only
    if len(peaks) > _BY_LINES and over is not None:
        return (fits + over) // 2
    first, second = sorted(sorted(peaks, key=lambda size: abs(peaks[size] - budget_bytes))[:2])
    slope = (peaks[second] - peaks[first]) / (second - first)
    guess = int(first + (budget_bytes - peaks[first]) / slope) if slope > 0 else 2 * second
    if over is None:
        return min(_LARGEST, max(fits + 1, min(guess, 16 * fits)))
    if guess in (fits, over):  # the line says where to stop: look at the neighbour
        guess = fits + 1 if guess == fits else over - 1
    return min(max(guess, fits + 1), over - 1)


def _resized(tensor: torch.Tensor, rows: int, size: int) -> torch.Tensor:
    """A tensor of zeros with as many samples as wanted; pages that nobody reads take no memory."""
    if not tensor.dim() or tensor.shape[0] != rows:
        return tensor
    resized = tensor.new_zeros((size, *tensor.shape[1:]))
    return resized.requires_grad_(tensor.requires_grad)
