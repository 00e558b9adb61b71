"""A step of a lower problem once more: its gradient, or the whole of it."""

import dataclasses
from typing import TYPE_CHECKING

import torch

from memfit.multilevel.change import change_parameters
from memfit.multilevel.records import Snapshot, StepRecord, gone_through_again

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem


def gradient_of(lower: "Problem", record: StepRecord) -> list[torch.Tensor | None]:
    """The gradient of the loss of a step at the parameters as they are; None where a parameter is not used."""
    lower.engine.openness.only(lower)
    scale = lower.mixed.scale
    put_aside = [parameter.grad for parameter in lower.parameter_list]
    for parameter in lower.parameter_list:
        parameter.grad = None
    for number, share in enumerate(record.shares):
        with gone_through_again(lower, record, number), torch.enable_grad():
            loss, _ = lower.loss_of(record.batches[number])
            (loss * (share * scale)).backward(inputs=lower.parameter_list)
    found = [parameter.grad for parameter in lower.parameter_list]
    for parameter, gradient in zip(lower.parameter_list, put_aside, strict=True):
        parameter.grad = gradient
    found = lower.engine.ranks.averaged(found, lower.parameter_list)
    return [part if part is None or scale == 1 else part / scale for part in found]


def repeated(lower: "Problem", record: StepRecord) -> StepRecord:
    """Make a step again, with the optimizer's settings of that time; returns its record with its start kept."""
    kept = dataclasses.replace(record, before=record.before or Snapshot(lower))
    if record.applied:
        for parameter, gradient in zip(lower.parameter_list, gradient_of(lower, record), strict=True):
            parameter.grad = gradient
        change_parameters(lower, settings=record.settings)
    return kept
