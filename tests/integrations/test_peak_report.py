"""Measured peaks beside predicted ones, whoever runs the steps."""

import logging

import pytest
import torch
from torch import nn

from memfit.integrations.peak_report import PeakReport
from memfit.integrations.within import Fitted

pytestmark = pytest.mark.usefixtures("one_thread")


def measured(report: PeakReport, model: nn.Module, *, beside_bytes: int = 0, budget_bytes: int = 2**40) -> int:
    """The peak of the second step."""
    fitted = Fitted(plans=(), budget_bytes=budget_bytes, predicted_peak_bytes=1)
    numbers = None
    for _ in range(2):
        report.step_begins([model], beside_bytes=beside_bytes)
        torch.ones(1000).add_(1)
        numbers = report.step_ended(fitted)
    assert numbers is not None
    return int(numbers["memfit/peak_bytes"])


def test_gradients_that_live_and_what_is_beside_count() -> None:
    model = nn.Linear(100, 50)
    held_bytes = sum(each.nbytes for each in model.parameters())
    without = measured(PeakReport("step", 1), model)
    assert without == pytest.approx(held_bytes + 4000, abs=64)  # and a number or two
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert measured(PeakReport("step", 1), model, beside_bytes=7) == without + held_bytes + 7


def test_the_first_step_is_not_measured_and_others_as_often_as_asked() -> None:
    report, fitted = PeakReport("step", 3), Fitted(plans=(), budget_bytes=2**40, predicted_peak_bytes=1)
    seen = []
    for _ in range(8):
        report.step_begins([nn.Linear(2, 2)], beside_bytes=0)
        seen.append(report.step_ended(fitted) is not None)
    assert seen == [False, True, False, False, True, False, False, True]


def test_a_step_over_the_budget_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        measured(PeakReport("batch", 1), nn.Linear(100, 50), budget_bytes=1000)
    assert "a batch took" in caplog.text
    assert "more than the budget of 1000 B" in caplog.text


def test_a_run_that_ended_in_the_middle_of_a_step_is_forgotten() -> None:
    report = PeakReport("step", 1)
    report.step_begins([], beside_bytes=0)
    report.step_begins([], beside_bytes=0)
    report.restart()
    assert measured(report, nn.Linear(2, 2)) > 0
