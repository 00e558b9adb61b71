"""The one signature of all hypergradient methods."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from memfit.multilevel.vectors import Vector

if TYPE_CHECKING:
    from memfit.multilevel.configs import Config
    from memfit.multilevel.problems import Problem

Gradients = dict["Problem", Vector]


class HasProducts(Protocol):
    """What can be multiplied with a vector."""

    lower: "Problem"

    def product(self, vector: Vector) -> Vector: ...


Solver = Callable[[HasProducts, Vector], Vector]  # what the curvature makes the given vector from


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pull:
    """A gradient that arrived at a lower solution and goes on to the problems that its loss uses."""

    lower: "Problem"
    vector: Vector  # of the upper loss, with respect to the lower parameters
    onto: tuple["Problem", ...]
    upper: "Problem"  # whose loss it is
    loss: torch.Tensor  # its value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A way to differentiate through a problem."""

    pull: Callable[[Pull], Gradients]
    second_order: bool  # whether it differentiates gradients of the lower loss
    solver: Callable[["Config"], Solver] | None = None  # of those that solve with the curvature
