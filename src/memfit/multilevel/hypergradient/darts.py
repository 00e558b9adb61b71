"""Finite difference: the mixed derivative along v from two first-order passes, with the identity for H⁻¹.

Liu et al., DARTS: Differentiable Architecture Search, 2019. Only the problems that the gradient goes on to require
gradients in the two passes: the lower network is a constant there and keeps no activations for its own parameters.
Limits: exact where the curvature is the identity and the lower gradient is linear along v.
"""

import torch

from memfit.errors import ExecutionError
from memfit.multilevel.hypergradient.curvature import check_depends
from memfit.multilevel.hypergradient.method import Gradients, Pull
from memfit.multilevel.records import gone_through_again, placed
from memfit.multilevel.vectors import Vector, norm

_TINY = 1e-12


def darts(pull: Pull) -> Gradients:
    """Take the gradient on by a finite difference along it."""
    return pulled_by_difference(pull, pull.vector, pull.lower.config.darts_alpha)


def pulled_by_difference(pull: Pull, vector: Vector, length: float) -> Gradients:
    """-(∂g/∂u)ᵀ v from losses at w ± εv, where ε is such that the step has the given length."""
    step = length / (float(norm(vector)) + _TINY)
    lower, others = pull.lower, [parameter for problem in pull.onto for parameter in problem.parameter_list]
    lower.engine.openness.only(*pull.onto)
    put_aside = [parameter.grad for parameter in others]
    for parameter in others:
        parameter.grad = None
    for sign in (1, -1):
        moved = [
            parameter.detach() + part * (sign * step)
            for parameter, part in zip(lower.parameter_list, vector, strict=True)
        ]
        with placed(lower.parameter_list, moved):
            _add_gradients(pull, others, -sign / (2 * step))
        del moved
    found = {problem: [parameter.grad for parameter in problem.parameter_list] for problem in pull.onto}
    for parameter, gradient in zip(others, put_aside, strict=True):
        parameter.grad = gradient
    for problem, gradients in found.items():
        check_depends(lower, problem, gradients)
    return {
        problem: [
            torch.zeros_like(p) if g is None else g for p, g in zip(problem.parameter_list, gradients, strict=True)
        ]
        for problem, gradients in found.items()
    }


def _add_gradients(pull: Pull, others: list[torch.nn.Parameter], factor: float) -> None:
    lower = pull.lower
    record = lower.record
    if record is None:
        raise ExecutionError(f"the problem {lower.name!r} made no step yet that {pull.upper.name!r} could use")
    for number, share in enumerate(record.shares):
        with gone_through_again(lower, record, number), torch.enable_grad():
            loss, _ = lower.loss_of(record.batches[number])
            if loss.requires_grad:
                (loss * (share * factor)).backward(inputs=others)
