"""Predicted against measured peak in the logs of a transformers Trainer. Only checks and reports."""

import logging
from typing import Any

from transformers import TrainerCallback

from memfit.execute.attach import captures_of
from memfit.integrations.within import Fitted
from memfit.measure.peak import PeakWatch
from memfit.step.buckets import Buckets
from memfit.units import format_bytes

log = logging.getLogger(__name__)

_FIRST_MEASURED = 1  # steps before: the first makes the optimizer's state


class ReportCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not looked into
    """Measures a step now and then and logs its peak beside the predicted one, through the trainer's own loggers."""

    def __init__(
        self, trainer: Any, fitted: Fitted, buckets: Buckets | None, measure_every: int, *, beside_bytes: int
    ) -> None:
        self.fitted = fitted
        self.buckets = buckets
        self.peak_bytes = 0  # the highest measured
        self._trainer = trainer
        self._measure_every = measure_every
        self._beside_bytes = beside_bytes  # batches, which were fetched before a step begins
        self._watch = PeakWatch()
        self._steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps = 0
        if self.buckets is not None:
            log.info("%s", self.buckets)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = self._measure_every and (self._steps - _FIRST_MEASURED) % self._measure_every == 0
        if due and self._steps >= _FIRST_MEASURED:
            self._watch.start(resident=[self._trainer.model, kwargs.get("optimizer")], beside_bytes=self._beside_bytes)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps += 1
        if not self._watch.running:
            return
        measured = self._watch.stop()
        if measured is None:
            return
        self.peak_bytes = max(self.peak_bytes, measured.peak_bytes)
        if measured.peak_bytes > self.fitted.budget_bytes:
            log.warning(
                "a step took %s, more than the budget of %s",
                format_bytes(measured.peak_bytes),
                format_bytes(self.fitted.budget_bytes),
            )
        self._log(control, {**self.fitted.scalars(), "memfit/peak_bytes": float(measured.peak_bytes)})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch.running:
            self._watch.stop()
        captures = captures_of(self._trainer.model)
        log.info("%s", captures)
        numbers = {
            "memfit/captures": float(captures.count),
            "memfit/capture_seconds": captures.seconds,
            "memfit/hit_rate": captures.hit_rate,
        }
        self._log(control, numbers)

    def _log(self, control: Any, numbers: dict[str, float]) -> None:
        should_log = control.should_log  # which logging would take for done
        self._trainer.log(numbers)
        control.should_log = should_log
