"""The predicted peak of a cycle against the measured one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reweighting import all_equal, parameters_of, run
from torch import nn

from memfit.errors import InvalidInput
from memfit.measure.peak import measure_peak
from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem

METHODS = {
    "darts": Config(type="darts"),
    "sama": Config(type="sama", gradient_accumulation=2),
    "cg": Config(type="cg", cg_iterations=2, cg_damping=1.0),
    "nystrom": Config(type="nystrom", nystrom_rank=3, nystrom_damping=1.0),
    "unrolled by roots": Config(type="unrolled", unroll_steps=4, unroll_checkpoint="sqrt"),
}


class Fresh:
    """Makes every batch anew, as a loader does."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.randn(512, 64), torch.randn(512, 64)


class Learner(ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        losses = F.mse_loss(self(batch[0]), batch[1], reduction="none").mean(1, keepdim=True)
        return (self.weigher(losses.detach()) * losses).mean()


class Weigher(ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.learner(batch[0]), batch[1])


def program(config: Config) -> Engine:
    torch.manual_seed(0)
    network = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    weights = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    batch = Fresh()
    learner = Learner("learner", config, network, torch.optim.Adam(network.parameters()), None, batch)
    weigher = Weigher("weigher", None, weights, torch.optim.Adam(weights.parameters()), None, batch)
    return Engine([weigher, learner], EngineConfig(), {"u2l": {weigher: [learner]}, "l2u": {learner: [weigher]}})


@pytest.mark.parametrize("name", METHODS)
def test_the_predicted_peak_is_the_measured_one(name: str) -> None:
    engine = program(METHODS[name])
    predicted = engine.estimate()
    cycle = engine.problems[1].config.unroll_steps
    run(engine, cycle)  # makes the optimizers' states
    for problem in engine.problems:  # the profiler does not see the end of what was there before it
        problem.record, problem.trajectory = None, []
    resident = [held for problem in engine.problems for held in (problem.module, problem.optimizer)]
    measured = measure_peak(lambda: run_quietly(engine, 2 * cycle), resident=resident)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.05)


LEAN = {
    "a plan": {"budget": 0.8},
    "updates inside": {"update": "inside"},
    "states on disk": {"state_tier": "disk"},
    "both": {"update": "inside", "state_tier": "disk"},
}


@pytest.mark.parametrize("name", LEAN)
def test_what_a_level_saves_is_counted(name: str, tmp_path: Any) -> None:
    place = {"directory": str(tmp_path)} if "state_tier" in LEAN[name] else {}
    predicted = {}
    for options in ({}, {**LEAN[name], **place}):
        engine = program(Config(type="darts", **options))
        predicted[len(options)] = engine.estimate().peak_bytes
    run(engine, 1)
    for problem in engine.problems:
        problem.record, problem.trajectory = None, []
    resident = [problem.module for problem in engine.problems] + [engine.problems[0].optimizer]
    if not place:
        resident.append(engine.problems[1].optimizer)
    measured = measure_peak(lambda: run_quietly(engine, 2), resident=resident)
    plain, lean = predicted.values()
    assert lean < plain or (name == "updates inside" and lean == plain)  # whose peak is in the forward pass
    assert lean == pytest.approx(measured.peak_bytes, rel=0.05)


def run_quietly(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.train_step()


def test_levels_are_reported_from_the_lowest_and_nothing_changes() -> None:
    engine, untouched = program(Config(type="sama")), program(Config(type="sama"))
    generator = torch.get_rng_state()
    estimate = engine.estimate()
    assert torch.equal(generator, torch.get_rng_state())
    assert [level.name for level in estimate.levels] == ["learner", "weigher"]
    assert estimate.resident_bytes < estimate.peak_bytes == max(level.peak_bytes for level in estimate.levels)
    assert estimate.fits(estimate.peak_bytes)
    assert not estimate.fits(estimate.peak_bytes - 1)
    assert "learner" in str(estimate)
    assert all_equal(parameters_of(engine), parameters_of(untouched))
    runs = []
    for each in (engine, untouched):
        torch.manual_seed(1)
        runs.append(run(each, 3))
    assert all_equal(*runs)


def test_a_step_that_needs_values_is_explained() -> None:
    engine = program(Config())
    engine.problems[1].training_step = lambda batch: batch[0][batch[0] > 0].sum() * engine.learner(batch[0]).sum()
    with pytest.raises(InvalidInput, match="without memory"):
        engine.estimate()
