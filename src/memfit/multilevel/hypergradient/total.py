"""The curvature of a middle problem whose own lowers answer while it moves.

Note [Answering as a whole]
    The loss of a middle problem P may use a lower solution l that itself depends on P: then P minimises
    L(p, l(p)), and its curvature is that of the whole, not of L with l held. With J = dl/dp, a change q of p comes
    with a change Jq of l, and the gradient of P changes by ∂_p φ + Jᵀ ∂_l φ, where φ = (q, Jq) · ∇L over (p, l). Jq
    takes one solve with the curvature of l, and Jᵀ another. The change of J itself is left out: exact where the lower
    losses are quadratic.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from memfit.errors import ExecutionError
from memfit.multilevel.hypergradient.curvature import Curvature, check_depends
from memfit.multilevel.hypergradient.method import Gradients, Solver
from memfit.multilevel.records import StepRecord
from memfit.multilevel.vectors import Vector, add_scaled, or_zeros

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem


class TotalCurvature:
    """As `Curvature`, with lowers that answer. See Note [Answering as a whole]."""

    def __init__(self, lower: "Problem", record: StepRecord, onto: Sequence["Problem"]) -> None:
        self.lower = lower
        self._answering = answering(lower)
        variables = (lower, *self._answering)
        self._joint = Curvature(lower, record, onto, variables)

    def product(self, vector: Vector) -> Vector:
        """The total curvature times a vector."""
        whole = self._with_answers(vector)
        own, *below = self._joint.pull_where_used(whole, (self.lower, *self._answering), is_last=False)
        result = or_zeros(own, self.lower.parameter_list)
        self.lower.engine.ranks.average(result)
        for problem, gradients in zip(self._answering, below, strict=True):
            back = self._through(problem, gradients, (self.lower,))[self.lower]
            result = add_scaled(result, back)
        return result

    def pull(self, vector: Vector, onto: Sequence["Problem"]) -> Gradients:
        """The gradient with respect to others, directly and through the lowers that answer."""
        found = self._joint.pull_where_used(self._with_answers(vector), (*onto, *self._answering))
        direct = dict(zip(onto, found[: len(onto)], strict=True))
        for problem, gradients in zip(self._answering, found[len(onto) :], strict=True):
            others = tuple(other for other in onto if other in problem.uppers)
            for other, back in self._through(problem, gradients, others).items() if others else ():
                direct[other] = [*add_scaled(or_zeros(direct[other], other.parameter_list), back)]
        for other, total in direct.items():
            check_depends(self.lower, other, total)
        return {other: or_zeros(total, other.parameter_list) for other, total in direct.items()}

    def _with_answers(self, vector: Vector) -> Vector:
        """A change of this problem, and the changes of its lowers that it brings."""
        whole = list(vector)
        for problem in self._answering:
            crossed = Curvature(problem, _record_of(problem), (), (self.lower,)).pull_where_used(vector, (problem,))
            right = or_zeros(crossed[0], problem.parameter_list)
            problem.engine.ranks.average(right)
            solved = _solver_of(problem)(curvature_of(problem, ()), right)
            whole += [-part for part in solved]
        return whole

    def _through(
        self, problem: "Problem", gradients: Sequence[torch.Tensor | None], onto: tuple["Problem", ...]
    ) -> Gradients:
        """A gradient at an answering lower, taken on; the same on all ranks."""
        vector = or_zeros(gradients, problem.parameter_list)
        problem.engine.ranks.average(vector)
        solved = _solver_of(problem)(curvature_of(problem, onto), vector)
        pulled = curvature_of(problem, onto).pull([-part for part in solved], onto)
        for part in pulled.values():
            problem.engine.ranks.average(part)
        return pulled


def answering(problem: "Problem") -> tuple["Problem", ...]:
    """Lowers that a problem uses and that use it, where both are solved with their curvature."""
    return tuple(lower for lower in problem.lowers if problem.answers_as_a_whole_with(lower))


def curvature_of(problem: "Problem", onto: Sequence["Problem"]) -> Curvature | TotalCurvature:
    """The curvature that a problem is solved with."""
    if answering(problem):
        return TotalCurvature(problem, _record_of(problem), onto)
    return Curvature(problem, _record_of(problem), onto)


def _record_of(problem: "Problem") -> StepRecord:
    if problem.record is None:
        raise ExecutionError(f"the problem {problem.name!r} made no step yet that a problem above could use")
    return problem.record


def _solver_of(problem: "Problem") -> Solver:
    solver = problem.solver
    assert solver is not None
    return solver
