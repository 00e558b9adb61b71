"""What a loss may return, and what it counts for beside the losses of other micro-batches.

Note [Weights]
    Gradients of pieces add up to those of the whole when every piece counts by what its loss is a mean of:
    samples (a scalar), or whatever a `weight` function counts in a piece, or the count that the loss returns beside
    its sum (`Mean`). A loss that is a sum (`reduction="sum"`) needs no weights.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from memfit.errors import InvalidInput

REDUCTIONS = ("mean", "sum")
Loss = Callable[[Any, Any], Any]  # the model and a batch: a scalar, a Mean, or a (sum, count) pair
Weight = Callable[[Any], Any]  # a batch: how many terms its loss is a mean of


@dataclasses.dataclass(frozen=True, eq=False)
class Mean:
    """A mean that is not divided yet, so that micro-batches with unequal counts add up to the whole batch's mean.

    Return it from a loss: `memfit.Mean(F.cross_entropy(..., reduction="sum"), count=(labels != -100).sum())`.
    """

    sum: torch.Tensor
    count: int | float | torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Term:
    """The loss of one piece."""

    value: torch.Tensor
    weight: float = 0.0  # how many terms it is a mean of
    is_mean: bool = True  # whether the whole is the mean over all terms, or their sum
    is_divided: bool = False  # whether `value` is divided by its weight already

    def seed(self, denominator: float) -> float:
        """The gradient to start the backward pass with, if the whole is divided by `denominator`."""
        return (self.weight if self.is_divided else 1.0) / denominator

    def contribution(self) -> torch.Tensor:
        """What it adds to the sum of all terms."""
        value = self.value.detach().reshape(())
        return value * self.weight if self.is_divided else value


def term_of(returned: Any, reduction: str, weight: Callable[[], float]) -> Term:
    """Read what a loss returned; `weight` says what a mean is over where the loss does not."""
    if isinstance(returned, tuple) and len(returned) == 2:
        returned = Mean(*returned)
    if isinstance(returned, Mean):
        return Term(value=_scalar(returned.sum), weight=_count(returned.count))
    if reduction == "sum":
        return Term(value=_scalar(returned), is_mean=False)
    return Term(value=_scalar(returned), weight=weight(), is_divided=True)


def counted(weight: Weight, batch: Any) -> float:
    """How much a batch counts, by the user's own function."""
    return _count(weight(batch))


def check_reduction(reduction: Any) -> None:
    """Refuse what no loss does."""
    if reduction not in REDUCTIONS:
        raise InvalidInput(f'reduction is "mean" or "sum", as the loss itself does it; {reduction!r} was given')


def _scalar(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InvalidInput(
            f"the loss returned {type(value).__name__}, which is not a scalar tensor; return a tensor with one number, "
            "memfit.Mean(sum, count) or (sum, count)"
        )
    if value.numel() != 1 or not value.is_floating_point():
        raise InvalidInput(
            f"the loss returned a tensor of shape {tuple(value.shape)} and {value.dtype}, which is not a scalar; "
            "reduce it with .mean() or .sum()"
        )
    if not value.requires_grad:
        raise InvalidInput(
            "the loss does not depend on any parameter that is trained; check for detach(), no_grad() or frozen "
            "parameters on the way to it"
        )
    return value


def _count(count: Any) -> float:
    number = float(count)
    if not 0 <= number < float("inf"):
        raise InvalidInput(f"a loss counts a finite number of terms from 0, {number} was found")
    return number
