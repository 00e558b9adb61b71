"""What methods that solve with the curvature share: solve, then pull.

At a lower solution the gradient of the lower loss g(w, u) is zero whatever u is, so dw/du = -H⁻¹ ∂g/∂u, and a
gradient v at w becomes -(H⁻¹v)ᵀ ∂g/∂u at u. The methods differ in how they find H⁻¹v.
"""

from memfit.multilevel.hypergradient.method import Gradients, Pull
from memfit.multilevel.hypergradient.total import curvature_of


def pulled_by_solving(pull: Pull) -> Gradients:
    """A gradient at the lower solution, taken on to the problems it depends on."""
    solver = pull.lower.solver
    assert solver is not None
    curvature = curvature_of(pull.lower, pull.onto)
    solved = solver(curvature, pull.vector)
    return curvature.pull([-part for part in solved], pull.onto)
