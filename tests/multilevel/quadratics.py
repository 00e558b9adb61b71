"""Problems whose solutions and hypergradients are known in closed form, in fp64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem, Problem

DIMENSION = 5


class Values(nn.Module):
    """A bare vector of parameters."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.clone())

    def forward(self) -> torch.Tensor:
        return self.values


def positive(size: int = DIMENSION, seed: int = 0) -> torch.Tensor:
    """A symmetric matrix with curvatures between 0.5 and 1.5."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    return basis @ torch.diag(torch.linspace(0.5, 1.5, size, dtype=torch.float64)) @ basis.T


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Written(ImplicitProblem):
    """A problem whose loss is a function of the problem and its batch."""

    def __init__(self, loss: Callable[[Any, Any], Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss = loss

    def training_step(self, batch: Any) -> Any:
        return self.loss(self, batch)


def written(
    name: str,
    values: torch.Tensor,
    loss: Callable[[Any, Any], Any],
    config: Config | None = None,
    *,
    rate: float = 0.0,
    batches: Sequence[Any] = (None,),
    kind: type[Written] = Written,
) -> Written:
    """A problem over a vector; with rate 0 it stays where it is, so gradients can be looked at."""
    module = Values(values)
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    return kind(loss, name, config, module, optimizer, None, list(batches))


def hypergradient(problems: Sequence[Problem], dependencies: dict[str, Any], upper: Problem) -> torch.Tensor:
    """The gradient that the upper problem's optimizer sees after one iteration."""
    seen: list[torch.Tensor] = []
    upper.grad_callback = lambda parameters: seen.append(parameters[0].grad.clone())  # type: ignore[attr-defined]
    engine = Engine(problems, EngineConfig(train_iters=1, valid_step=10**9), dependencies)
    while not seen:
        engine.train_step()
    return seen[0]


def bilevel(upper: Problem, lower: Problem) -> dict[str, Any]:
    return {"u2l": {upper: [lower]}, "l2u": {lower: [upper]}}
