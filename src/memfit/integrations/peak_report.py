"""Measured peaks of a run that somebody else drives, beside the predicted one, for whatever logs there are."""

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from memfit.execute.attach import captures_of
from memfit.integrations.within import Fitted
from memfit.measure.peak import PeakWatch
from memfit.units import format_bytes

log = logging.getLogger(__name__)


class PeakReport:
    """Measures the second step, which has the optimizer's state, and every so many-th after it."""

    def __init__(self, noun: str, measure_every: int) -> None:
        self.peak_bytes = 0  # the highest measured
        self._noun = noun  # what a step is called
        self._measure_every = measure_every  # 0: never
        self._watch = PeakWatch()
        self._seen = 0

    def restart(self) -> None:
        """A run begins, or one has ended, maybe by an error in the middle of a step."""
        self._seen = 0
        if self._watch.running:
            self._watch.stop()

    def step_begins(self, resident: Iterable[Any], *, beside_bytes: int) -> None:
        """`resident` is what lives already and counts; gradients of its modules are added."""
        is_due = self._seen and self._measure_every and (self._seen - 1) % self._measure_every == 0
        self._seen += 1
        if is_due:
            held = list(resident)
            modules = [each for each in held if isinstance(each, nn.Module)]
            gradients = [parameter.grad for module in modules for parameter in module.parameters()]
            self._watch.start(resident=[*held, gradients], beside_bytes=beside_bytes)

    def step_ended(self, fitted: Fitted) -> dict[str, float] | None:
        """Numbers for a logger, if the step was measured."""
        measured = self._watch.stop() if self._watch.running else None
        if measured is None:
            return None
        self.peak_bytes = max(self.peak_bytes, measured.peak_bytes)
        if measured.peak_bytes > fitted.budget_bytes:
            log.warning(
                "a %s took %s, more than the budget of %s",
                self._noun,
                format_bytes(measured.peak_bytes),
                format_bytes(fitted.budget_bytes),
            )
        return {**fitted.scalars(), "memfit/peak_bytes": float(measured.peak_bytes)}


def capture_numbers(models: Iterable[nn.Module]) -> dict[str, float]:
    """How often models met a new kind of call, for a logger."""
    captures = [captures_of(model) for model in models]
    count, calls = sum(each.count for each in captures), sum(each.calls for each in captures)
    return {
        "memfit/captures": float(count),
        "memfit/capture_seconds": sum(each.seconds for each in captures),
        "memfit/hit_rate": 1 - count / calls if calls > count else 0.0,
    }
