"""Gradients that are bigger than what they are made of come last."""

import pytest
import torch
from torch import fx, nn

import memfit
from memfit.capture.late_gradients import compute_gradients_late
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.measure.peak import measure_peak

pytestmark = pytest.mark.usefixtures("one_thread")


def model() -> nn.Sequential:
    """Few samples and many weights behind convolutions, as in VGG."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 32 * 32, 64),
        nn.Linear(64, 4),
    )


def test_the_big_gradient_moves_behind_the_convolutions_and_small_ones_stay() -> None:
    with traced(model(), Sample.of(torch.randn(4, 3, 32, 32))) as joint:
        graph = joint.graph_module.graph
        before = [node.name for node in graph.nodes]
        compute_gradients_late(joint)
        after = [node.name for node in graph.nodes]
        (big,) = (node.name for node in graph.nodes if node.name.startswith("mm") and _numel(node) == 64 * 16 * 32 * 32)
    assert sorted(before) == sorted(after)
    convolutions = [name for name in before if name.startswith("convolution_backward")]
    assert len(convolutions) == 2
    assert all(before.index(big) < before.index(each) for each in convolutions)
    assert all(after.index(big) > after.index(each) for each in convolutions)
    others = [name for name in before if name.startswith("mm") and name != big]
    assert others
    assert all(after.index(name) < after.index(convolutions[0]) for name in others)


def test_what_the_backward_pass_starts_from_is_not_held_for_it() -> None:
    wide = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8192, bias=False))
    with traced(wide, Sample.of(torch.randn(128, 16))) as joint:
        before = [node.name for node in joint.graph_module.graph.nodes]
        compute_gradients_late(joint)
        assert [node.name for node in joint.graph_module.graph.nodes] == before


def _numel(node: fx.Node) -> int:
    return int(node.meta["val"].numel())


def test_a_plan_stays_below_what_the_eager_order_needs() -> None:
    own, planned = model(), model()
    batch = torch.randn(4, 3, 32, 32)

    def step(each: nn.Module) -> None:
        each.zero_grad()
        each(batch).square().mean().backward()

    memfit.fit(planned, batch, budget="smallest", kernels="inductor", time_limit=1.0)
    for each in (own, planned):
        step(each)
        each.zero_grad()
    own_bytes, planned_bytes = (
        measure_peak(lambda e=e: step(e), resident=[e, batch]).peak_bytes for e in (own, planned)
    )
    weights_bytes = sum(each.nbytes for each in own.parameters())
    assert planned_bytes - 2 * weights_bytes < 0.5 * (own_bytes - 2 * weights_bytes)
    for one, other in zip(own.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
