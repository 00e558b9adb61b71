"""Gradients of pieces that add up to the gradient of the whole.

Note [Denominators]
    The whole is the sum of all terms divided by their number, and that number is known for certain only when the
    last piece has run forward. Gradients are therefore accumulated over a denominator that is expected (exactly right
    when all weights are known before or all are equal). Before the last backward pass they are brought to the
    true one, so that what follows (clipping, an update inside that pass) sees the gradients of the whole.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from memfit.errors import InvalidInput
from memfit.step.losses import Term


@dataclasses.dataclass
class Accumulation:
    """What has been added up since the last update."""

    batches: int = 0  # whole batches
    weight: float = 0.0  # of their pieces
    denominator: float | None = None  # of the accumulated gradients, see Note [Denominators]

    def seed(
        self,
        term: Term,
        *,
        expected: float,
        share: float | None,
        parameters: Iterable[nn.Parameter],
        ranks: int = 1,
    ) -> float:
        """Count one piece in; the gradient its backward pass starts with.

        `share` is given for the last piece of an update: of all weights on all ranks, which then average.
        """
        if not term.is_mean:
            return float(ranks)  # a sum, which the average over ranks divides
        self.weight += term.weight
        if share is not None:
            self.settle(parameters, share)
        elif self.denominator is None:
            self.denominator = expected
        assert self.denominator is not None
        return term.seed(self.denominator)

    def settle(self, parameters: Iterable[nn.Parameter], share: float) -> None:
        """Bring the gradients so far to the true denominator."""
        if not share > 0:
            raise InvalidInput(
                "no piece of the batch has anything to count (every weight is 0), so its mean does not exist; leave "
                "such batches out"
            )
        if self.denominator is not None and self.denominator != share:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            with torch.no_grad():
                for gradient in gradients:
                    gradient.mul_(self.denominator / share)
        self.denominator = share

    def to_json(self) -> dict[str, float | None]:
        return dataclasses.asdict(self)


def total_of(terms: Sequence[Term]) -> torch.Tensor:
    """The loss of a batch from the terms of its pieces; of one piece as the loss said it."""
    first, weight = terms[0], sum(term.weight for term in terms)
    if len(terms) == 1:
        value = first.value.detach().reshape(())
        return value if first.is_divided or not first.is_mean else value / weight
    total = torch.stack([term.contribution() for term in terms]).sum()
    return total / weight if first.is_mean else total
