"""The predicted peak of a step whose saved tensors are in a file is above the measured one, and not by much."""

import pytest
import torch
from budgeted import Answering, ConvNet, Perceptron, images, rows
from test_inside_budget import MODELS
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.capture.rehearse import nothing_remains, step
from memfit.capture.sample import Sample
from memfit.capture.spilled import SMALLEST_BYTES, spilled_activations
from memfit.measure.peak import measure_peak
from memfit.plan.spilled import spilled_peak


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)) for _ in range(3)
        )

    def forward(self, features):
        for block in self.blocks:
            features = checkpoint(block, features, use_reentrant=False)
        return features.square().mean()


CASES = MODELS | {
    "without a loss": (ConvNet, images),
    "residual": (Perceptron, rows),
    "big outputs": (Answering, lambda: torch.randn(256, 64)),
    "checkpointed": (Checkpointed, rows),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CASES)
def test_predicted_and_measured(name):
    make, batch = CASES[name]
    model, sample = make().train(), Sample.of(batch())
    captured = memfit.plan(model, sample, budget="1GiB").step
    predicted = spilled_peak(captured.eager, captured.eager_workspace_bytes, smallest_bytes=SMALLEST_BYTES)
    written = []

    def run():
        with spilled_activations([*model.parameters(), *model.buffers(), *sample.tensors()]) as file:
            step(model, sample, seed=0, holds_output=False)
            written.append(file.size_bytes)

    with nothing_remains(model, sample):
        measured = measure_peak(run, resident=[model, sample.args])
    assert measured.peak_bytes <= predicted.peak_bytes <= 1.25 * measured.peak_bytes
    assert written[0] <= predicted.file_bytes <= 1.1 * written[0] + SMALLEST_BYTES
