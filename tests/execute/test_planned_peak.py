"""What the simulator says of a program is what running it takes."""

import pytest
import torch
from programs import forget_everything, keep_everything, keeping, planned
from torch import nn

from memfit.measure.peak import measure_peak
from memfit.measure.probe import measured_costs
from memfit.plan.simulate import simulate


class MeanSquare(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, features):
        return self.layers(features).square().mean()


def convolutions():
    def block():
        return nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Dropout(0.1)

    return MeanSquare(*block(), *block(), *block()), torch.randn(16, 16, 32, 32)


def encoder():
    return MeanSquare(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)), torch.randn(128, 32, 32)


PLANNERS = {
    "keep everything": keep_everything,
    "forget everything": forget_everything,
    "keep half, nothing in place": keeping(lambda storage: storage % 2 == 0, in_place=lambda _: False),
}


@pytest.mark.parametrize("make", [convolutions, encoder])
def test_the_measured_peak_is_the_simulated_one(make):
    model, batch = make()
    peaks = {}
    for name, planner in PLANNERS.items():
        made = []
        captured = planned(model, batch, lambda graph, planner=planner, made=made: made.append(graph) or planner(graph))
        peaks[name] = simulated_peak(made[0], planner(made[0]))
        assert measured_peak(captured, batch) == pytest.approx(peaks[name], rel=0.01)
    assert peaks["forget everything"] < 0.6 * peaks["keep everything"]


def simulated_peak(graph, program):
    costs = measured_costs((each.signature for each in graph.operations if each.signature), device="cpu")
    workspaces = [costs[each.signature].workspace_bytes for each in graph.operations]
    return simulate(graph, program, workspace_bytes=workspaces).peak_bytes


def measured_peak(model, batch):
    def step():
        model(batch).backward()

    step()
    model.zero_grad(set_to_none=True)
    return measure_peak(step, resident=[model, batch]).peak_bytes
