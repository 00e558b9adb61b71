"""The other sides of the multilevel benchmark: Betty, plain unrolling, and a loop written by hand."""

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import functional_call

from benchmarks.multilevel_programs import (
    UNROLLED,
    regression_batch,
    residual_mlp,
    weigher,
    weighted_regression,
)


def has_betty() -> bool:
    """Whether the package betty-ml is installed beside memfit."""
    return importlib.util.find_spec("betty") is not None


def betty_program(**settings: Any) -> Any:
    """The residual MLP as a Betty program; its engine has `train_step`."""
    from betty.configs import Config, EngineConfig
    from betty.engine import Engine
    from betty.problems import ImplicitProblem

    logging.disable(logging.WARNING)

    class Regression(ImplicitProblem):  # type: ignore[misc]
        def training_step(self, batch: Any) -> torch.Tensor:
            return weighted_regression(self, self.weights, batch)

    class Weights(ImplicitProblem):  # type: ignore[misc]
        def training_step(self, batch: Any) -> torch.Tensor:
            return F.mse_loss(self.regression(batch[0]), batch[1])

    torch.manual_seed(0)
    network, weights_net, batches = residual_mlp(), weigher(), [regression_batch()]
    lower, upper = Config(**settings), Config(type="darts")
    descent = torch.optim.SGD(network.parameters(), lr=0.01)
    regression = Regression("regression", lower, network, descent, None, batches)
    adam = torch.optim.Adam(weights_net.parameters())
    weights = Weights("weights", upper, weights_net, adam, None, batches)
    engine = Engine(
        config=EngineConfig(),
        problems=[weights, regression],
        dependencies={"u2l": {weights: [regression]}, "l2u": {regression: [weights]}},
    )
    engine.train()
    return engine


def plain_unrolling() -> tuple[Callable[[], None], list[Any]]:
    """One cycle of unrolling as it is usually written, the graph of all steps kept; and what it holds."""
    torch.manual_seed(0)
    network, weights, batch = residual_mlp(), weigher(), regression_batch()
    optimizer = torch.optim.Adam(weights.parameters())

    def cycle() -> None:
        current = {name: value.detach().requires_grad_() for name, value in network.named_parameters()}
        for _ in range(UNROLLED):
            loss = weighted_regression(lambda x, now=current: functional_call(network, now, (x,)), weights, batch)
            slopes = torch.autograd.grad(loss, list(current.values()), create_graph=True)
            current = {name: value - 0.01 * slope for (name, value), slope in zip(current.items(), slopes, strict=True)}
        optimizer.zero_grad()
        F.mse_loss(functional_call(network, current, (batch[0],)), batch[1]).backward()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(current[name])

    return cycle, [network, weights, optimizer]


def loop_by_hand() -> tuple[Callable[[], None], list[Any]]:
    """One cycle of the finite difference as one would write it by hand, with care for memory; and what it holds."""
    torch.manual_seed(0)
    network, weights, batch = residual_mlp(), weigher(), regression_batch()
    parameters, others = list(network.parameters()), list(weights.parameters())
    descent, adam = torch.optim.SGD(parameters, lr=0.01), torch.optim.Adam(others)

    def require(flag: bool, which: list[torch.nn.Parameter]) -> None:
        for parameter in which:
            parameter.requires_grad_(flag)

    def cycle() -> None:
        require(False, others)
        descent.zero_grad()
        weighted_regression(network, weights, batch).backward()
        descent.step()
        vector = torch.autograd.grad(F.mse_loss(network(batch[0]), batch[1]), parameters)
        length = torch.cat([part.flatten() for part in vector]).norm()
        step = 0.01 / (float(length) + 1e-12)
        require(False, parameters)
        require(True, others)
        adam.zero_grad()
        own = [parameter.data for parameter in parameters]
        for sign in (1, -1):
            for parameter, value, part in zip(parameters, own, vector, strict=True):
                parameter.data = value + part * (sign * step)
            (weighted_regression(network, weights, batch) * (-sign / (2 * step))).backward()
        for parameter, value in zip(parameters, own, strict=True):
            parameter.data = value
        adam.step()
        require(True, parameters)

    return cycle, [network, weights, descent, adam]
