"""Peak and time of one forward and backward pass, the same way for memfit and its peers."""

import dataclasses
import math
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.models import Case
from memfit.measure.peak import held_bytes, measure_peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A case that is built: the plain eager side of every comparison."""

    case: Case
    model: nn.Module
    batch: Any

    @classmethod
    def of(cls, case: Case) -> "Subject":
        torch.manual_seed(0)
        return cls(case=case, model=case.make_model().train(), batch=case.make_batch(case.batch_size))

    def step(self, model: nn.Module) -> torch.Tensor:
        """Forward and backward through the eager model or a changed copy of it."""
        model.zero_grad()
        loss = self.case.loss(model, self.batch)
        loss.backward()
        return loss.detach()


def peak_bytes(subject: Subject, model: nn.Module) -> int:
    """Of a whole forward and backward, with parameters, buffers, batch and gradients."""
    model.zero_grad()
    peak = measure_peak(lambda: subject.step(model), resident=[model, subject.batch]).peak_bytes
    model.zero_grad()
    return peak


def persistent_bytes(subject: Subject) -> int:
    """What is live when the backward pass ends: parameters, buffers, gradients, batch, loss."""
    loss = subject.step(subject.model)
    gradients = [parameter.grad for parameter in subject.model.parameters() if parameter.grad is not None]
    held = held_bytes([subject.model, gradients, subject.batch, loss])
    subject.model.zero_grad()
    return held


class Interleaved(NamedTuple):
    """Steps of two models in turns."""

    eager_s: float  # a step
    ratio: float  # of the other's step to that
    error: float  # standard error of the ratio


def interleaved(subject: Subject, other: nn.Module, *, pairs: int, seconds: float = 0.0) -> Interleaved:
    """Medians over pairs of steps in both orders; more pairs than asked for until `seconds` have passed."""
    for model in (subject.model, other):
        _seconds(subject, model)
    eager_times: list[float] = []
    ratios: list[float] = []
    end = time.perf_counter() + seconds
    while len(ratios) < pairs or time.perf_counter() < end:
        order = (subject.model, other) if len(ratios) % 2 else (other, subject.model)
        taken = {id(model): _seconds(subject, model) for model in order}
        eager_times.append(taken[id(subject.model)])
        ratios.append(taken[id(other)] / eager_times[-1])
    return Interleaved(statistics.median(eager_times), statistics.median(ratios), _error_of_median(ratios))


def _error_of_median(values: list[float]) -> float:
    """What a median is off by, as the spread around it tells; outliers count little."""
    middle = statistics.median(values)
    deviation = 1.48 * statistics.median(abs(each - middle) for each in values)  # that of a normal distribution
    return 1.25 * deviation / math.sqrt(len(values))


def _seconds(subject: Subject, model: nn.Module) -> float:
    model.zero_grad()
    start = time.perf_counter()
    subject.case.loss(model, subject.batch).backward()
    return time.perf_counter() - start
