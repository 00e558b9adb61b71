"""Peak and time of one forward and backward pass, the same way for memfit and its peers."""

import dataclasses
import statistics
import time
from typing import Any

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


def interleaved(subject: Subject, other: nn.Module, *, pairs: int) -> tuple[float, float]:
    """Seconds of an eager step, and the other's ratio to it: medians over pairs of steps in both orders."""
    for model in (subject.model, other):
        _seconds(subject, model)
    eager_times: list[float] = []
    ratios: list[float] = []
    for number in range(pairs):
        order = (subject.model, other) if number % 2 else (other, subject.model)
        seconds = {id(model): _seconds(subject, model) for model in order}
        eager_times.append(seconds[id(subject.model)])
        ratios.append(seconds[id(other)] / eager_times[-1])
    return statistics.median(eager_times), statistics.median(ratios)


def _seconds(subject: Subject, model: nn.Module) -> float:
    model.zero_grad()
    start = time.perf_counter()
    subject.case.loss(model, subject.batch).backward()
    return time.perf_counter() - start
