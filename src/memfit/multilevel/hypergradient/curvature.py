"""First and second derivatives of a lower step, over all its micro-batches and ranks.

Note [One graph or many]
    With one micro-batch the graph of its gradient is kept between products, so that each costs one backward pass;
    the pull that comes last gives it back while it runs. With several micro-batches, or where the problem has a
    budget, each product computes the gradient of one micro-batch after the other again: more time, the memory of one.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from memfit.errors import InvalidInput
from memfit.multilevel.hypergradient.twice import check_twice_differentiable, explaining
from memfit.multilevel.records import StepRecord, gone_through_again
from memfit.multilevel.vectors import Vector, or_zeros, summed

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem

Optional = list[torch.Tensor | None]


class Curvature:
    """Products with second derivatives of the loss of a step, at the parameters as they are.

    Gradients are taken with respect to `variables`, the lower problem itself if none are given, and differentiated with
    respect to these and `onto`.
    """

    def __init__(
        self,
        lower: "Problem",
        record: StepRecord,
        onto: Sequence["Problem"],
        variables: Sequence["Problem"] | None = None,
    ) -> None:
        self.lower = lower
        self.record = record
        variables = (lower,) if variables is None else variables
        self._open = (lower, *variables, *onto)
        self._variables = [parameter for problem in variables for parameter in problem.parameter_list]
        self._keeps_graph = len(record.batches) == 1 and lower.config.budget is None
        self._kept: Optional | None = None

    def gradient(self) -> Optional:
        """The gradient of the loss itself; None where a parameter is not used."""
        total: Optional = [None] * len(self.lower.parameter_list)
        self.lower.engine.openness.only(*self._open)
        for gradient, share in self._gradients():
            total = _summed(total, [None if part is None else part.detach() for part in gradient], share)
        return self.lower.engine.ranks.averaged(total, self.lower.parameter_list)

    def product(self, vector: Sequence[torch.Tensor]) -> Vector:
        """The Hessian times a vector, the same on all ranks."""
        parameters = self.lower.parameter_list
        result = or_zeros(self._pulled(vector, parameters, is_last=False), parameters)
        self.lower.engine.ranks.average(result)
        return result

    def pull(self, vector: Sequence[torch.Tensor], onto: Sequence["Problem"]) -> dict["Problem", Vector]:
        """The gradient with respect to others of the vector times the lower gradient; of this rank's share."""
        found = dict(zip(onto, self.pull_where_used(vector, onto), strict=True))
        for problem, gradients in found.items():
            check_depends(self.lower, problem, gradients)
        return {problem: or_zeros(gradients, problem.parameter_list) for problem, gradients in found.items()}

    def pull_where_used(
        self, vector: Sequence[torch.Tensor], onto: Sequence["Problem"], *, is_last: bool = True
    ) -> list[Optional]:
        """As `pull`, with None for parameters that the lower gradient does not depend on."""
        groups = [problem.parameter_list for problem in onto]
        parts = iter(self._pulled(vector, [parameter for group in groups for parameter in group], is_last=is_last))
        return [[next(parts) for _ in group] for group in groups]

    def _pulled(self, vector: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, is_last: bool) -> Optional:
        total: Optional = [None] * len(inputs)
        self.lower.engine.openness.only(*self._open)
        for gradient, share in self._gradients():
            pairs = [
                (part, weight)
                for part, weight in zip(gradient, vector, strict=True)
                if part is not None and part.requires_grad
            ]
            if pairs:
                with explaining(self.lower):
                    pulled = torch.autograd.grad(
                        [part for part, _ in pairs],
                        inputs,
                        [weight.to(part.dtype) for part, weight in pairs],
                        retain_graph=self._keeps_graph and not is_last,
                        allow_unused=True,
                    )
                total = _summed(total, list(pulled), share)
        if is_last:
            self._kept = None
        return total

    def _gradients(self) -> Iterator[tuple[Optional, float]]:
        """Differentiable gradients of each micro-batch, and its share in the loss. See Note [One graph or many]."""
        for number, share in enumerate(self.record.shares):
            if self._keeps_graph:
                if self._kept is None:
                    self._kept = self._differentiable_gradient(number)
                yield self._kept, share
            else:
                yield self._differentiable_gradient(number), share

    def _differentiable_gradient(self, number: int) -> Optional:
        lower, scale = self.lower, self.lower.mixed.scale
        with gone_through_again(lower, self.record, number), torch.enable_grad():
            loss, _ = lower.loss_of(self.record.batches[number])
            if not lower.is_known_twice_differentiable:
                check_twice_differentiable(lower, loss)
            with explaining(lower):
                gradient = torch.autograd.grad(
                    loss if scale == 1 else loss * scale, self._variables, create_graph=True, allow_unused=True
                )
            return [part if part is None or scale == 1 else part / scale for part in gradient]


def check_depends(lower: "Problem", other: "Problem", gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuse a dependency that was declared and is not there."""
    if other.parameter_list and all(gradient is None for gradient in gradients):
        raise InvalidInput(
            f"the loss of the problem {lower.name!r} does not depend on {other.name!r} in a way that matters to its "
            f"gradient, though the dependencies say so; use self.{other.name} in its training_step (without detach or "
            "no_grad), or take the dependency out"
        )


def _summed(total: Optional, parts: Optional, share: float) -> Optional:
    """`total + share * parts`, where None stands for zero."""
    return [summed(a, b if b is None or share == 1 else b * share) for a, b in zip(total, parts, strict=True)]
