"""SAMA: a finite difference along what the optimizer would make of the gradient.

Choe et al., Making Scalable Meta Learning Practical, 2023. The lower problem's next step answers a change of its
gradient by ∂(update)/∂(gradient); the vector is pulled through that, for any optimizer that torch can
differentiate, and then as in `darts`. Exact for one step of the lower problem up to the finite difference.
Limits: what earlier steps passed on is left out.
"""

from memfit.errors import ExecutionError
from memfit.multilevel.hypergradient.again import gradient_of
from memfit.multilevel.hypergradient.darts import pulled_by_difference
from memfit.multilevel.hypergradient.method import Gradients, Pull
from memfit.multilevel.hypergradient.update import Adjoint, pulled_through_update
from memfit.multilevel.records import Snapshot
from memfit.multilevel.vectors import or_zeros


def sama(pull: Pull) -> Gradients:
    """Take the gradient on by a finite difference along its image under the optimizer."""
    lower = pull.lower
    if lower.record is None:
        raise ExecutionError(f"the problem {lower.name!r} made no step yet that {pull.upper.name!r} could use")
    gradient = gradient_of(lower, lower.record)
    through = pulled_through_update(lower, Snapshot(lower), gradient, Adjoint(parameters=pull.vector), onto=())
    del gradient
    vector = [-part for part in or_zeros(through.gradient, lower.parameter_list)]
    return pulled_by_difference(pull, vector, lower.config.sama_alpha)
