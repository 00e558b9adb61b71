"""Budgets of levels: planned where first-order, checkpointed where second-order, the same numbers either way."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reweighting import all_equal, data, largest_difference, run
from torch import nn
from torch.utils.data import DataLoader

import memfit
from memfit.errors import InvalidInput
from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem


class Learner(ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return (self.weigher(losses.detach().unsqueeze(1)).squeeze(1) * losses).mean()


class Weigher(ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.learner(batch[0]), batch[1])


def program(lower: Config, upper: Config | None = None) -> Engine:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(6, 64)]
    for _ in range(4):
        layers += [nn.GELU(), nn.Linear(64, 64)]
    network, weights = (
        nn.Sequential(*layers, nn.Linear(64, 3)),
        nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)),
    )
    loader = DataLoader(data(256, 1), batch_size=128)
    learner = Learner("learner", lower, network, torch.optim.SGD(network.parameters(), lr=0.1), None, loader)
    weigher = Weigher("weigher", upper, weights, torch.optim.SGD(weights.parameters(), lr=0.1), None, loader)
    dependencies = {"u2l": {weigher: [learner]}, "l2u": {learner: [weigher]}}
    return Engine([weigher, learner], EngineConfig(), dependencies)


def test_a_planned_level_computes_the_same_bits() -> None:
    planned = program(Config(budget=0.7))
    assert all_equal(run(program(Config()), 3), run(planned, 3))
    plan = memfit.plan_of(planned.problems[1].module)
    assert plan is not None
    assert plan.peak_bytes < 0.71 * plan.unplanned_peak_bytes


@pytest.mark.parametrize("kind", ["cg", "unrolled"])
def test_a_level_that_is_differentiated_twice_is_checkpointed_and_says_so(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    budgeted = program(Config(type=kind, budget="1GiB", cg_damping=1.0))
    with caplog.at_level(logging.INFO, logger="memfit.multilevel"):
        found = run(budgeted, 2)
    assert f"method '{kind}' of 'learner'" in caplog.text
    assert memfit.plan_of(budgeted.problems[1].module) is None
    assert largest_difference(found, run(program(Config(type=kind, cg_damping=1.0)), 2)) <= 1e-6


def test_an_upper_module_is_not_planned_where_a_lower_method_differentiates_it_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="memfit.multilevel"):
        run(program(Config(type="cg", cg_damping=1.0), Config(budget="1GiB")), 1)
    assert "weigher: the budget is kept by checkpoints" in caplog.text


def test_a_budget_for_a_module_that_is_not_called_is_refused() -> None:
    engine = program(Config(), Config(budget="1GiB"))
    with pytest.raises(InvalidInput, match=r"'weigher' has a budget.*does not call its module"):
        engine.train_step()
