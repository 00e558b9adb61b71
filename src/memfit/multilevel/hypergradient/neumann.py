"""Neumann series: H⁻¹v ≈ α Σ (I - αH)ᵏ v over k = 0 … iterations.

Lorraine et al., Optimizing Millions of Hyperparameters by Implicit Differentiation, 2020. Limits: converges only
where α is below 2 / the greatest curvature; what is missing is (I - αH)^(iterations + 1) of the whole.
"""

from typing import TYPE_CHECKING

from memfit.multilevel.hypergradient.method import HasProducts, Solver
from memfit.multilevel.vectors import Vector, add_scaled

if TYPE_CHECKING:
    from memfit.multilevel.configs import Config


def neumann(config: "Config") -> Solver:
    """Solve with the curvature by its power series."""

    def solve(curvature: HasProducts, vector: Vector) -> Vector:
        term, total = vector, vector
        for _ in range(config.neumann_iterations):
            term = add_scaled(term, curvature.product(term), -config.neumann_alpha)
            total = add_scaled(total, term)
        return [part * config.neumann_alpha for part in total]

    return solve
