"""Neumann series: H⁻¹v ≈ α Σ (I - αH)ᵏ v over k = 0 … iterations.

Lorraine et al., Optimizing Millions of Hyperparameters by Implicit Differentiation, 2020. Limits: converges only
where α is below 2 / the greatest curvature; what is missing is (I - αH)^(iterations + 1) of the whole.
"""

from memfit.multilevel.hypergradient.curvature import Curvature
from memfit.multilevel.hypergradient.implicit import pulled_by
from memfit.multilevel.hypergradient.method import Gradients, Pull
from memfit.multilevel.vectors import Vector, add_scaled


def neumann(pull: Pull) -> Gradients:
    """Solve with the curvature by its power series."""
    config = pull.lower.config

    def solve(curvature: Curvature, vector: Vector) -> Vector:
        term, total = vector, vector
        for _ in range(config.neumann_iterations):
            term = add_scaled(term, curvature.product(term), -config.neumann_alpha)
            total = add_scaled(total, term)
        return [part * config.neumann_alpha for part in total]

    return pulled_by(solve, pull)
