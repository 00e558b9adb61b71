"""Predicted against measured peak in the logs of a transformers Trainer. Only checks and reports."""

import logging
from typing import Any

from transformers import TrainerCallback

from memfit.execute.attach import captures_of
from memfit.integrations.peak_report import PeakReport, capture_numbers
from memfit.integrations.within import Fitted
from memfit.step.buckets import Buckets

log = logging.getLogger(__name__)


class ReportCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not looked into
    """Measures a step now and then and logs its peak beside the predicted one, through the trainer's own loggers."""

    def __init__(
        self, trainer: Any, fitted: Fitted, buckets: Buckets | None, measure_every: int, *, beside_bytes: int
    ) -> None:
        self.fitted = fitted
        self.buckets = buckets
        self._trainer = trainer
        self._beside_bytes = beside_bytes  # batches, which were fetched before a step begins
        self._report = PeakReport("step", measure_every)

    @property
    def peak_bytes(self) -> int:
        """The highest measured."""
        return self._report.peak_bytes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report.restart()
        if self.buckets is not None:
            log.info("%s", self.buckets)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        resident = [self._trainer.model, kwargs.get("optimizer")]
        self._report.step_begins(resident, beside_bytes=self._beside_bytes)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        numbers = self._report.step_ended(self.fitted)
        if numbers is not None:
            self._log(control, numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report.restart()
        log.info("%s", captures_of(self._trainer.model))
        self._log(control, capture_numbers([self._trainer.model]))

    def _log(self, control: Any, numbers: dict[str, float]) -> None:
        should_log = control.should_log  # which logging would take for done
        self._trainer.log(numbers)
        control.should_log = should_log
