"""Peak and time of one forward and backward pass, the same way for memfit and its peers."""

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
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
    others_s, eager_s = taking_turns(subject, [other, subject.model], rounds=pairs, seconds=seconds)
    return Interleaved(statistics.median(eager_s), *ratio(others_s, eager_s))


def taking_turns(
    subject: Subject, models: Sequence[nn.Module], *, rounds: int, seconds: float = 0.0
) -> list[list[float]]:
    """Seconds of steps of each, round by round, everyone first in turn; more rounds until `seconds` have passed."""
    for model in reversed(models):  # to warm up
        _seconds(subject, model)
    taken: list[list[float]] = [[] for _ in models]
    end = time.perf_counter() + seconds
    number = 0
    while number < rounds or time.perf_counter() < end:
        for place in range(len(models)):
            turn = (place + number) % len(models)
            taken[turn].append(_seconds(subject, models[turn]))
        number += 1
    return taken


def ratio(ones_s: Sequence[float], others_s: Sequence[float]) -> tuple[float, float]:
    """The median of what one takes to what another takes in the same round, and its standard error."""
    ratios = [one / other for one, other in zip(ones_s, others_s, strict=True)]
    return statistics.median(ratios), _error_of_median(ratios)


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
