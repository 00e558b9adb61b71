"""Nyström: the curvature seen through a few random directions, inverted in closed form.

Hataya and Yamada, Nyström Method for Accurate and Scalable Implicit Differentiation, 2023. With a sketch Q of
rank k, C = HQ and W = QᵀHQ, the curvature is taken as C W⁻¹ Cᵀ, diagonalised, and inverted with the damping on
the diagonal. At full rank it is exact. Limits: k vectors of the parameters' size are kept.
"""

from typing import TYPE_CHECKING

import torch

from memfit.errors import ExecutionError
from memfit.multilevel.hypergradient.method import HasProducts, Solver
from memfit.multilevel.vectors import Vector, flat, unflat

if TYPE_CHECKING:
    from memfit.multilevel.configs import Config

_ROUNDINGS = 100  # curvatures below so many roundings of the greatest count as none


def nystrom(config: "Config") -> Solver:
    """Solve with a low-rank curvature."""

    def solve(curvature: HasProducts, vector: Vector) -> Vector:
        line = flat(vector)
        sketch = _sketch(line, min(config.nystrom_rank, line.numel()), curvature.lower.count)
        columns = torch.stack([flat(curvature.product(unflat(column, vector))) for column in sketch.T], dim=1)
        if not bool(columns.isfinite().all()):
            raise ExecutionError(
                f"the curvature of the problem {curvature.lower.name!r} is not finite; its steps have diverged: lower "
                "its learning rate, or clip its gradient"
            )
        basis, curvatures = _diagonalised(columns, sketch)
        return unflat(_inverted(line, basis, curvatures, config.nystrom_damping), vector)

    return solve


def _sketch(line: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    """Orthonormal directions; the same on all ranks, without touching anybody's generator."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(line.numel(), rank, generator=generator, dtype=torch.float64)
    directions: torch.Tensor = torch.linalg.qr(random).Q
    return directions.to(line)


def _diagonalised(columns: torch.Tensor, sketch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Directions and curvatures of C W⁻¹ Cᵀ; what has the size of the sketch is computed in fp64."""
    span, mixing = torch.linalg.qr(columns)
    core, mixing = (sketch.T @ columns).double(), mixing.double()
    small = mixing @ torch.linalg.pinv((core + core.T) / 2, rtol=_smallest(columns), hermitian=True) @ mixing.T
    curvatures, directions = torch.linalg.eigh((small + small.T) / 2)
    return span @ directions.to(span), curvatures.to(span)


def _smallest(tensor: torch.Tensor) -> float:
    return _ROUNDINGS * float(torch.finfo(tensor.dtype).eps)


def _inverted(line: torch.Tensor, basis: torch.Tensor, curvatures: torch.Tensor, damping: float) -> torch.Tensor:
    inside = basis.T @ line
    damped = curvatures + damping
    known = damped.abs() > _smallest(line) * curvatures.abs().max()
    inverse = torch.where(known, 1 / torch.where(known, damped, 1), 0)
    solved = basis @ (inverse * inside)
    return solved if damping == 0 else solved + (line - basis @ inside) / damping
