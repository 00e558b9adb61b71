"""What was chosen for a training step under a budget, and what else there was: inert data for people and programs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from memfit.plan.plan import Plan
from memfit.step.policy import StepPolicy
from memfit.units import format_bytes

CHOSEN = "chosen"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternative:
    """One way to run the step that was looked at."""

    techniques: str  # in words
    peak_bytes: int | None = None  # predicted for the whole step; None: not known
    sample_us: float | None = None  # predicted time of one sample; None: not known
    verdict: str  # "chosen", or why it lost

    @property
    def is_chosen(self) -> bool:
        return self.verdict == CHOSEN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """How a step is run under a budget. `explain()` shows what else was considered and why it lost."""

    model: str  # class of the model
    budget_bytes: int
    sample_count: int  # of the batch it was made for
    policy: StepPolicy
    plan: Plan | None  # of one micro-batch with its loss; None: the model and the loss run by themselves
    peak_bytes: int  # predicted for the whole step
    sample_us: float  # predicted time of one sample
    times_measured: bool  # False: estimated from a device's profile
    alternatives: tuple[Alternative, ...]  # in the order they were looked at
    seconds: float  # that choosing took

    @property
    def step_us(self) -> float:
        """Predicted time of the whole step."""
        return self.sample_us * self.sample_count

    def explain(self) -> str:
        """Every alternative that was considered, with its figures, and why it lost."""
        return "\n".join([str(self), *_table(self.alternatives)])

    def to_dict(self) -> dict[str, Any]:
        """For machines; the plan is left to `plan.save`."""
        return {
            "model": self.model,
            "budget_bytes": self.budget_bytes,
            "sample_count": self.sample_count,
            "policy": self.policy.to_json(),
            "planned": self.plan is not None,
            "peak_bytes": self.peak_bytes,
            "sample_us": self.sample_us,
            "times_measured": self.times_measured,
            "alternatives": [dataclasses.asdict(each) for each in self.alternatives],
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        chosen = next(each for each in self.alternatives if each.is_chosen)
        measured = "" if self.times_measured else " (times are estimated)"
        return (
            f"{self.model}, {self.sample_count} samples a step under {format_bytes(self.budget_bytes)}: "
            f"{chosen.techniques}; predicted peak {format_bytes(self.peak_bytes)}, {_time(self.sample_us)} a "
            f"sample{measured}"
        )


def describe(policy: StepPolicy, *, planned: bool) -> str:
    """Techniques in words."""
    return ", ".join(_words(policy, planned)) or "plain"


def _words(policy: StepPolicy, planned: bool) -> Iterator[str]:
    if policy.micro_batches > 1:
        yield f"{policy.micro_batches} micro-batches"
    if policy.precision is not None:
        yield policy.precision
    if planned:
        yield "planned"
    if policy.update == "inside":
        yield "update inside backward"
    if policy.state_tier is not None:
        yield f"optimizer state in the {policy.state_tier} tier"


def _table(alternatives: tuple[Alternative, ...]) -> Iterator[str]:
    width = max(len(each.techniques) for each in alternatives)
    yield f"  {'techniques':{width}}  {'peak':>11}  {'a sample':>10}  verdict"
    for each in alternatives:
        peak = "" if each.peak_bytes is None else format_bytes(each.peak_bytes)
        time = "" if each.sample_us is None else _time(each.sample_us)
        yield f"  {each.techniques:{width}}  {peak:>11}  {time:>10}  {each.verdict}"


def _time(time_us: float) -> str:
    return f"{time_us / 1e3:.2f} ms" if time_us >= 1e3 else f"{time_us:.1f} us"
