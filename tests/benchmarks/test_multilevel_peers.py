"""The sides of the multilevel benchmark compute the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.multilevel import peak_of, peak_of_pull
from benchmarks.multilevel_peers import loop_by_hand, plain_unrolling
from benchmarks.multilevel_programs import UNROLLED, regression_program, resnet50
from memfit.measure.peak import measure_peak
from memfit.multilevel import Config


@pytest.mark.parametrize(
    ("settings", "make"),
    [({"type": "darts"}, loop_by_hand), ({"type": "unrolled", "unroll_steps": UNROLLED}, plain_unrolling)],
)
def test_a_cycle_of_the_engine_is_a_cycle_of_the_peer(
    settings: dict[str, Any], make: Callable[[], tuple[Callable[[], None], list[Any]]]
) -> None:
    engine = regression_program(Config(**settings))
    for _ in range(engine.problems[1].config.unroll_steps):
        engine.train_step()
    cycle, (network, weights, *_) = make()
    cycle()
    pairs = ((engine.problems[1].module, network), (engine.problems[0].module, weights))
    for ours, theirs in pairs:
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert float((a.detach() - b.detach()).abs().max()) <= 1e-5


@pytest.mark.slow
def test_unrolling_takes_a_fifth_of_the_memory_of_a_kept_graph() -> None:
    cycle, held = plain_unrolling()
    cycle()
    plain_bytes = measure_peak(cycle, resident=held).peak_bytes
    engine = regression_program(Config(type="unrolled", unroll_steps=UNROLLED))
    assert peak_of(engine, UNROLLED) <= plain_bytes / 5


def test_a_finite_difference_keeps_no_activations_of_the_lower_network() -> None:
    engine = regression_program(Config(type="darts"))
    step_bytes = peak_of(engine, 1)  # of which one backward pass is most
    assert peak_of_pull(engine) <= step_bytes / 4


def test_resnet50_has_its_depth() -> None:
    layers = [module for module in resnet50().modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(layers) == 50 + 4  # and the shortcuts
