"""Conjugate gradients: (H + damping) q = v, exact after as many products as there are distinct curvatures.

Rajeswaran et al., Meta-Learning with Implicit Gradients, 2019. Limits: the curvature must be positive; where a
direction is found along which it is not, the solver stops with what it has.
"""

from memfit.multilevel.hypergradient.curvature import Curvature
from memfit.multilevel.hypergradient.implicit import pulled_by
from memfit.multilevel.hypergradient.method import Gradients, Pull
from memfit.multilevel.vectors import Vector, add_scaled, dot


def cg(pull: Pull) -> Gradients:
    """Solve with the curvature by conjugate gradients."""
    config = pull.lower.config

    def solve(curvature: Curvature, vector: Vector) -> Vector:
        return solved_by_cg(
            curvature,
            vector,
            iterations=config.cg_iterations,
            scale=config.cg_alpha,
            damping=config.cg_damping,
            tolerance=config.cg_tolerance,
        )

    return pulled_by(solve, pull)


def solved_by_cg(
    curvature: Curvature, vector: Vector, *, iterations: int, scale: float, damping: float, tolerance: float
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
