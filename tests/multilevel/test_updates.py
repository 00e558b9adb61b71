"""Levels that keep less for their updates: the same numbers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reweighting import all_equal, data, run
from torch import nn
from torch.utils.data import DataLoader

from memfit.errors import InvalidInput
from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem


class Learner(ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return (self.weigher(losses.detach().unsqueeze(1)).squeeze(1) * losses).mean()


class Weigher(ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.learner(batch[0]), batch[1])


class Watched(Learner):
    def grad_callback(self) -> None:
        pass


def program(
    lower: Config, upper: Config | None = None, *, kind: type[Learner] = Learner, roll_back: bool = False
) -> Engine:
    torch.manual_seed(3)
    network = nn.Sequential(
        nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
    )
    weights = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    loader = DataLoader(data(96, 1), batch_size=32)
    learner = kind("learner", lower, network, torch.optim.AdamW(network.parameters(), lr=0.01), None, loader)
    weigher = Weigher("weigher", upper, weights, torch.optim.Adam(weights.parameters(), lr=0.01), None, loader)
    dependencies = {"u2l": {weigher: [learner]}, "l2u": {learner: [weigher]}}
    return Engine([weigher, learner], EngineConfig(roll_back=roll_back), dependencies)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("technique", ["inside", "disk", "inside and disk"])
def test_the_numbers_stay_the_same(technique: str, accumulation: int, tmp_path: Path) -> None:
    plain = run(program(Config(gradient_accumulation=accumulation)), 5)
    on_disk = {"state_tier": "disk", "directory": str(tmp_path)} if "disk" in technique else {}
    update = "inside" if "inside" in technique else "after"
    lean = program(Config(gradient_accumulation=accumulation, update=update, **on_disk))
    assert all_equal(plain, run(lean, 5))


def test_a_planned_level_updates_inside_its_backward_pass() -> None:
    assert all_equal(run(program(Config()), 4), run(program(Config(update="inside", budget="smallest")), 4))


def test_the_state_of_an_upper_level_can_be_on_disk(tmp_path: Path) -> None:
    upper = Config(state_tier="disk", directory=str(tmp_path))
    assert all_equal(run(program(Config()), 4), run(program(Config(), upper), 4))


def test_a_run_with_state_on_disk_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    config = Config(state_tier="disk", directory=str(tmp_path), update="inside")
    whole = run(program(config), 6)
    first = program(config)
    run(first, 3)
    first.save(tmp_path / "engine.safetensors")
    second = program(config)
    second.load(tmp_path / "engine.safetensors")
    assert all_equal(whole, run(second, 3))


def test_an_estimate_can_be_made(tmp_path: Path) -> None:
    engine = program(Config(state_tier="disk", directory=str(tmp_path), update="inside"))
    assert engine.estimate().peak_bytes > 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: program(Config(), Config(update="inside")), "'weigher'.*through 'learner'"),
        (lambda: program(Config(update="inside"), kind=Watched), "grad_callback of the problem 'learner'"),
        (lambda: Config(update="inside", gradient_clipping=1.0), "clip_norm"),
        (lambda: Config(update="inside", fp16=True), "fp16"),
        (lambda: Config(state_tier="disk"), "directory"),
        (lambda: Config(update="sometimes"), "'sometimes'"),
        (lambda: program(Config(type="unrolled", state_tier="disk", directory=".")), "gone through again"),
        (lambda: program(Config(state_tier="disk", directory="."), roll_back=True), "gone through again"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        make()
