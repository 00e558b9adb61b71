"""What eager refuses to compute because of values fails in a captured call as well, or is not captured."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit


class Hot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * F.one_hot(labels, num_classes=4)).square().mean()


class Checked(nn.Module):
    """Checks a sum of its batch, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, checks_batch: bool) -> torch.Tensor:
        torch._assert_async(torch.ones(1).sum() > 0, "a constant")
        if checks_batch:
            torch._assert_async(x.sum() > 0, "not positive")
        return self.linear(x).square().mean()


def test_labels_out_of_range_are_refused_as_in_eager() -> None:
    eager = Hot()
    x, labels = torch.randn(8, 4), torch.arange(8) % 4
    fitted = memfit.fit(copy.deepcopy(eager), (x, labels), None, progress=False)
    for model in (eager, fitted):
        model(x, labels).backward()
    assert torch.equal(eager.linear.weight.grad, fitted.linear.weight.grad)
    for wrong in (labels + 1, labels - 1):
        for model in (eager, fitted):
            with pytest.raises(RuntimeError):
                model(x, wrong)


def test_a_check_of_the_batch_is_refused_by_name() -> None:
    sample = memfit.Sample((torch.rand(8, 4),), {"checks_batch": True})
    with pytest.raises(memfit.CaptureError, match=r"checks values by torch\._assert_async"):
        memfit.fit(Checked(), sample, None, progress=False)


def test_a_check_whose_answer_is_known_is_no_matter() -> None:
    sample = memfit.Sample((torch.rand(8, 4),), {"checks_batch": False})
    model = memfit.fit(Checked(), sample, None, progress=False)
    assert model(torch.rand(8, 4), checks_batch=False).requires_grad
