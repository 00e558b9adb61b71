"""Unrolling: the exact derivative of the steps that the lower problem made.

Maclaurin et al., Gradient-based Hyperparameter Optimization through Reversible Learning, 2015; Finn et al., MAML,
2017; truncation: Shaban et al., 2019.

Note [Steps backwards]
    The lower problem steps as always and keeps no graph, only what it started each step from. Backwards, one step
    at a time is made again with its graph: through the update, then through the gradient. So the memory is that
    of one step whatever their number, beside the kept states: of every step (`unroll_checkpoint="step"`), or of
    every √T-th with the steps between made again first (`"sqrt"`).
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from memfit.errors import ExecutionError, InvalidInput
from memfit.multilevel.hypergradient.again import repeated
from memfit.multilevel.hypergradient.curvature import Curvature, check_depends
from memfit.multilevel.hypergradient.method import Gradients, Pull
from memfit.multilevel.hypergradient.update import Adjoint, pulled_through_update
from memfit.multilevel.records import Snapshot, StepRecord, placed
from memfit.multilevel.vectors import Vector, or_zeros, summed

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem


def unrolled(pull: Pull) -> Gradients:
    """Take the gradient back through the steps of the inner loop. See Note [Steps backwards]."""
    lower = pull.lower
    if not lower.trajectory:
        raise ExecutionError(f"the problem {lower.name!r} made no step yet that {pull.upper.name!r} could use")
    totals: list[list[torch.Tensor | None]] = [[None] * len(each.parameter_list) for each in pull.onto]
    adjoint = Adjoint(parameters=pull.vector)
    if lower.config.first_order is not True:
        for record in _backwards(lower):
            adjoint = _through_step(pull, record, adjoint, totals)
    if not lower.config.unroll_truncation or lower.config.unroll_truncation >= len(lower.trajectory):
        _through_start(pull, adjoint.parameters, totals)
    for problem, total in zip(pull.onto, totals, strict=True):
        check_depends(lower, problem, total)
    return {problem: or_zeros(total, problem.parameter_list) for problem, total in zip(pull.onto, totals, strict=True)}


def kept_every(lower: "Problem") -> int:
    """How many steps lie between two whose start is kept."""
    return math.isqrt(lower.config.unroll_steps) if lower.config.unroll_checkpoint == "sqrt" else 1


def _backwards(lower: "Problem") -> Iterator[StepRecord]:
    """The steps to differentiate from the last to the first, each with the state it started from."""
    trajectory = lower.trajectory
    first = max(len(trajectory) - (lower.config.unroll_truncation or len(trajectory)), 0)
    end = len(trajectory)
    while end > first:
        start = max(number for number in range(end) if trajectory[number].before is not None)
        records = trajectory[start:end] if end == start + 1 else _made_again(lower, trajectory[start:end])
        yield from reversed(records[max(first - start, 0) :])
        end = start


def _made_again(lower: "Problem", records: list[StepRecord]) -> list[StepRecord]:
    """Steps whose start was not kept, made again from the last one that was."""
    now = Snapshot(lower)
    try:
        assert records[0].before is not None
        records[0].before.restore(lower)
        return [repeated(lower, record) for record in records]
    finally:
        now.restore(lower)


def _through_step(pull: Pull, record: StepRecord, after: Adjoint, totals: list[list[torch.Tensor | None]]) -> Adjoint:
    lower = pull.lower
    if not record.applied:
        return after
    assert record.before is not None
    with placed(lower.parameter_list, record.before.parameters):
        curvature = Curvature(lower, record, pull.onto)
        others = [parameter for problem in pull.onto for parameter in problem.parameter_list]
        through = pulled_through_update(lower, record.before, curvature.gradient(), after, others)
        vector = or_zeros(through.gradient, lower.parameter_list)
        found = curvature.pull_where_used(vector, (lower, *pull.onto))
    by_update = iter(through.onto)
    for total, gradients in zip(totals, found[1:], strict=True):
        for number, gradient in enumerate(gradients):
            total[number] = summed(summed(total[number], gradient), next(by_update))
    own = or_zeros(found[0], lower.parameter_list)
    lower.engine.ranks.average(own)
    before = through.before
    return Adjoint(parameters=[a + b for a, b in zip(before.parameters, own, strict=True)], state=before.state)


def _through_start(pull: Pull, adjoint: Vector, totals: list[list[torch.Tensor | None]]) -> None:
    """Where the inner loop starts from other problems' parameters, they get what arrives at the start."""
    lower = pull.lower
    start = getattr(lower, "initial_parameters", None)
    if start is None:
        return
    lower.engine.openness.only(*pull.onto)
    with torch.enable_grad():
        tensors = list(start())
    pairs = [(tensor, part) for tensor, part in zip(tensors, adjoint, strict=True) if tensor.requires_grad]
    others = [parameter for problem in pull.onto for parameter in problem.parameter_list]
    if not pairs:
        raise InvalidInput(
            f"initial_parameters of the problem {lower.name!r} depend on no upper problem; return tensors made from "
            "one without detach"
        )
    found = iter(
        torch.autograd.grad([tensor for tensor, _ in pairs], others, [part for _, part in pairs], allow_unused=True)
    )
    for total in totals:
        for number, part in enumerate(total):
            total[number] = summed(part, next(found))
