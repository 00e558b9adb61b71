"""What is killed: each takes a folder of its own, leaves there what memfit keeps, and returns its numbers in words."""

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from budgeted import ConvNet, images
from generated.compiled import compiled_everywhere, stretches_that_run
from regional import Branching
from torch import nn

import memfit
from memfit.measure.cost import CostCache, OperatorCost

_SAVES = 300
_CLOSE = 1e-3
_COSTS = 50  # saves of a cache that grows

PLAN = "plan.json"


def fit(folder: Path) -> str:
    model, batch = _model(), images(4)
    memfit.fit(model, batch, 0.8, time_limit=0.3, progress=False)
    return _trained(model, batch)


def fit_in_regions(folder: Path) -> str:
    torch.manual_seed(0)
    model, batch = Branching(), images(4)
    memfit.fit(model, batch, "smallest", time_limit=0.3, progress=False)
    return _trained(model, batch)


def plan(folder: Path) -> str:
    """Make a plan and save it; where one is there already it must be whole."""
    model, batch = _model(), images(4)
    if (folder / PLAN).exists():
        memfit.Plan.load(folder / PLAN)
    memfit.plan(model, batch, budget=0.8, time_limit=0.3, progress=False).save(folder / PLAN)
    memfit.apply(memfit.Plan.load(folder / PLAN), model, batch)
    return _trained(model, batch)


def save_plans(folder: Path) -> str:
    """Save one plan over another again and again."""
    given = os.environ["MEMFIT_KILLED_PLAN"]
    one = memfit.Plan.load(given)
    other = memfit.Plan.from_json(one.to_json())
    if (folder / PLAN).exists():
        assert memfit.Plan.load(folder / PLAN) == one
    for number in range(_SAVES):
        (other if number % 2 else one).save(folder / PLAN)
    return str(memfit.Plan.load(folder / PLAN).peak_bytes)


def save_costs(folder: Path) -> str:
    """Save a cache of costs that grows; whatever is in it must be what was saved."""
    cache = CostCache("cpu")
    for number in range(_COSTS):
        assert all(int(name) == cost.workspace_bytes for name, cost in cache.load().items())
        sizes = range(20 * number, 20 * number + 20)
        cache.save({str(size): OperatorCost(workspace_bytes=size, output_bytes=(size,)) for size in sizes})
    return str(len(cache.load()))


def fit_compiled(folder: Path) -> str:
    """Compare with eager here: which kernels are compiled, and in which layout, depends on times."""
    model, plain, batch = _without_dropout(), _without_dropout(), images(4)
    with compiled_everywhere("inductor"), stretches_that_run() as ran:
        memfit.fit(model, batch, 0.8, kernels="inductor", time_limit=0.3, progress=False)
        found = _trained(model, batch)
    assert ran
    assert all(each.is_compiled for each in ran), [each.failure for each in ran]
    for one, other in zip(found.split(), _trained(plain, batch).split(), strict=True):
        assert math.isclose(float.fromhex(one), float.fromhex(other), rel_tol=_CLOSE, abs_tol=_CLOSE)
    return "close"


WORKLOADS: dict[str, Callable[[Path], str]] = {
    each.__name__: each for each in (fit, fit_in_regions, plan, save_plans, save_costs, fit_compiled)
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return ConvNet(4)


def _without_dropout() -> nn.Module:
    """In channels last its masks lie otherwise."""
    model = _model()
    model.dropout = nn.Identity()
    return model


def _trained(model: nn.Module, batch: torch.Tensor) -> str:
    """Two steps: losses and what became of the parameters, to the bit."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        words.append(float(loss.detach()).hex())
    return " ".join([*words, *(float(each.detach().double().sum()).hex() for each in model.parameters())])


def run(name: str, folder: Path) -> str:
    """Run one with all that is kept in its folder."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return WORKLOADS[name](folder)
