"""What steps that are run for their time or peak leave behind: nothing."""

import pytest
import torch
from torch import nn

from memfit.capture.rehearse import nothing_remains, step
from memfit.capture.sample import Sample
from memfit.errors import InvalidModel


class Masked(nn.Module):
    """With statistics that a step changes, and a buffer that cannot be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.ones(1, 8).expand(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(x) * self.mask).square().mean()


def test_statistics_gradients_and_generators_are_put_back() -> None:
    model, sample = Masked(), Sample.of(torch.randn(4, 8))
    model.norm.weight.grad = before = torch.ones(8)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    generator = torch.get_rng_state()
    with nothing_remains(model, sample):
        step(model, sample, seed=3)
        assert model.norm.weight.grad is not before
        assert not torch.equal(model.norm.running_mean, buffers["norm.running_mean"])
    assert model.norm.weight.grad is before
    assert model.norm.bias.grad is None
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), generator)


def test_what_was_not_changed_is_not_written() -> None:
    model, sample = Masked(), Sample.of(torch.randn(4, 8))
    with nothing_remains(model, sample):
        step(model, sample, seed=3)
    counts = {name: buffer._version for name, buffer in model.named_buffers()}
    with nothing_remains(model, sample):
        pass
    assert {name: buffer._version for name, buffer in model.named_buffers()} == counts


def test_a_step_without_gradients_is_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidModel, match="no output of the model requires a gradient"):
        step(nn.Identity(), Sample.of(torch.randn(4, 8)), seed=3)
