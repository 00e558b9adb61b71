"""Conjugate gradients: (H + damping) q = v, exact after as many products as there are distinct curvatures.

Rajeswaran et al., Meta-Learning with Implicit Gradients, 2019. Limits: the curvature must be positive; where a
direction is found along which it is not, the solver stops with what it has.
"""

from typing import TYPE_CHECKING

from memfit.multilevel.hypergradient.method import HasProducts, Solver
from memfit.multilevel.vectors import Vector, add_scaled, dot

if TYPE_CHECKING:
    from memfit.multilevel.configs import Config


def cg(config: "Config") -> Solver:
    """Solve with the curvature by conjugate gradients."""

    def solve(curvature: HasProducts, vector: Vector) -> Vector:
        return solved_by_cg(
            curvature,
            vector,
            iterations=config.cg_iterations,
            scale=config.cg_alpha,
            damping=config.cg_damping,
            tolerance=config.cg_tolerance,
        )

    return solve


def solved_by_cg(
    curvature: HasProducts, vector: Vector, *, iterations: int, scale: float, damping: float, tolerance: float
) -> Vector:
    """Q with scale * (H + damping) q = scale * v; the scale changes rounding only."""
    right = [part * scale for part in vector]
    solution = [part * 0 for part in vector]
    residual, direction = right, right
    square = dot(residual, residual)
    enough = float(square) * tolerance**2
    for _ in range(iterations):
        if float(square) <= enough:
            break
        product = [
            (curved + part * damping) * scale
            for curved, part in zip(curvature.product(direction), direction, strict=True)
        ]
        bend = dot(direction, product)
        if float(bend) <= 0:
            break
        step = square / bend
        solution = add_scaled(solution, direction, step)
        residual = add_scaled(residual, product, -step)
        square, previous = dot(residual, residual), square
        direction = add_scaled(residual, direction, square / previous)
    return solution
