"""What methods that solve with the curvature share: solve, then pull.

At a lower solution the gradient of the lower loss g(w, u) is zero whatever u is, so dw/du = -H⁻¹ ∂g/∂u, and a
gradient v at w becomes -(H⁻¹v)ᵀ ∂g/∂u at u. The methods differ in how they find H⁻¹v.
"""

from collections.abc import Callable

from memfit.errors import ExecutionError
from memfit.multilevel.hypergradient.curvature import Curvature
from memfit.multilevel.hypergradient.method import Gradients, Pull
from memfit.multilevel.vectors import Vector

Solve = Callable[[Curvature, Vector], Vector]


def pulled_by(solve: Solve, pull: Pull) -> Gradients:
    """A gradient at the lower solution, taken on to the problems it depends on."""
    record = pull.lower.record
    if record is None:
        raise ExecutionError(f"the problem {pull.lower.name!r} made no step yet that {pull.upper.name!r} could use")
    curvature = Curvature(pull.lower, record, pull.onto)
    solved = solve(curvature, pull.vector)
    return curvature.pull([-part for part in solved], pull.onto)
