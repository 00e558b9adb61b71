"""Models that leave out layers at random are planned for a step in which all of them run."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.sample import Sample
from memfit.measure.peak import measure_peak
from memfit.regions.fullest import fullest_seed

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = 6


class Dropping(nn.Module):
    def __init__(self, drawn: Callable[[], float], rate: float = 0.3) -> None:
        super().__init__()
        self.drawn, self.rate = drawn, rate
        self.stem = nn.Linear(64, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()) for _ in range(LAYERS)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.stem(rows)
        for layer in self.layers:
            if self.drawn() >= self.rate:
                rows = rows + layer(rows)
        return rows.square().mean()


def by_torch() -> float:
    return torch.rand(()).item()


def ran_from(model: nn.Module, sample: torch.Tensor, seed: int) -> int:
    torch.manual_seed(seed)
    random.seed(seed)
    ran: list[nn.Module] = []
    hooks = [layer.register_forward_hook(lambda layer, *_: ran.append(layer)) for layer in model.layers]
    model(sample)
    for hook in hooks:
        hook.remove()
    return len(ran)


@pytest.mark.parametrize("drawn", [by_torch, random.random], ids=["torch", "Python"])
def test_all_layers_run_from_the_seed_that_is_found(drawn):
    model, sample = Dropping(drawn), torch.randn(8, 64)
    seed = fullest_seed(model, Sample((sample,)))
    assert seed
    assert ran_from(model, sample, seed) == LAYERS


def test_the_model_and_all_generators_stay_as_they_are():
    model, sample = Dropping(random.random), torch.randn(8, 64)
    before = torch.get_rng_state(), random.getstate()
    fullest_seed(model, Sample((sample,)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_part_that_never_runs_is_not_waited_for():
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    model.forward = lambda rows: model["used"](rows)
    assert fullest_seed(model, Sample((torch.randn(2, 4),))) == 0


def test_steps_with_all_layers_stay_inside_the_budget_and_equal_to_eager():
    torch.manual_seed(0)
    plain, sample = Dropping(by_torch), torch.randn(256, 64)
    fitted = memfit.fit(copy.deepcopy(plain), sample, 0.6, optimizer="adamw", time_limit=1, progress=False)
    plan = memfit.plan_of(fitted)
    assert plan.regions
    optimizer = torch.optim.AdamW(fitted.parameters())

    def step() -> None:
        fitted(sample).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for seed in range(20):
        torch.manual_seed(seed)
        assert measure_peak(step, resident=[fitted, sample, optimizer]).peak_bytes <= 1.01 * plan.budget_bytes
