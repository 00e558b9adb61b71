"""What a planned step really takes: peak and time, beside what was predicted and beside the eager step."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from torch import nn

from memfit.accelerator import synchronize
from memfit.alone import alone
from memfit.api import apply
from memfit.capture.rehearse import drop_gradients, nothing_remains, step
from memfit.capture.sample import Sample
from memfit.describe import device_of
from memfit.errors import InvalidFile, InvalidInput, first_line
from memfit.execute.attach import PlannedForward, planned_forwards, put_back, remove, removed
from memfit.files import parse_json
from memfit.internal import in_sentences
from memfit.measure.peak import measure_peak
from memfit.plan.plan import Plan
from memfit.progress import ProgressLike, progress_line
from memfit.units import format_bytes

FORMAT = "memfit.profile"
VERSION = 1
_TEXT = str(str)
_TOLERANCE = 0.01  # what a measured peak may be above the budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Predicted and measured. Optimizer state is not held while measuring: its bytes are added to the peaks."""

    model: str
    predicted_peak_bytes: int
    peak_bytes: int
    eager_peak_bytes: int | None  # None: the eager step was not run
    predicted_slowdown: float
    slowdown: float | None  # median over pairs of steps; None without eager steps
    step_s: float  # of the planned step
    pairs: int
    budget_bytes: int | None

    @property
    def fits(self) -> bool:
        """Whether the measured peak is within the budget, up to what predictions may be off."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes * (1 + _TOLERANCE)

    def to_json(self) -> str:
        fields = dataclasses.asdict(self) | {"fits": self.fits}
        return json.dumps({"format": FORMAT, "version": VERSION} | fields, indent=2)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `to_json` wrote; a file that is not that is refused with the reason."""
        try:
            fields = parse_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidFile(f"{path} cannot be read as a profile: {first_line(error)}") from None
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise InvalidFile(
                f"{path} is not a profile: its format is not {FORMAT!r}; write one with memfit profile --json"
            )
        if fields.get("version") != VERSION:
            raise InvalidFile(
                f"{path} is a profile of version {fields.get('version')!r}, this memfit reads version {VERSION}; "
                "measure again, or install the memfit that wrote it"
            )
        try:
            return cls(**{field.name: _checked(fields[field.name], field) for field in dataclasses.fields(cls)})
        except (KeyError, TypeError) as error:
            raise InvalidFile(f"{path} is a damaged profile: {type(error).__name__}: {first_line(error)}") from None

    def __str__(self) -> str:
        eager = "" if self.eager_peak_bytes is None else f", eager {format_bytes(self.eager_peak_bytes)}"
        error = self.predicted_peak_bytes / self.peak_bytes - 1
        lines = [
            f"{self.model}: peak {format_bytes(self.peak_bytes)} (predicted {format_bytes(self.predicted_peak_bytes)}, "
            f"{error:+.2%}{eager})"
        ]
        if self.slowdown is None:
            lines.append(
                f"  {self.step_s:.3f} s a step; no eager step was run beside it, which would be over the budget "
                f"(predicted {self.predicted_slowdown:+.1%}); eager=True runs it all the same"
            )
        else:
            lines.append(
                f"  time {self.slowdown:+.1%} against eager (predicted {self.predicted_slowdown:+.1%}), "
                f"median of {self.pairs} pairs, {self.step_s:.3f} s a step"
            )
        if self.budget_bytes is not None:
            lines.append(f"  {'within' if self.fits else 'OVER'} the budget of {format_bytes(self.budget_bytes)}")
        return "\n".join(lines)


def _checked(value: Any, field: "dataclasses.Field[Any]") -> Any:
    """A value of a file, if it can be one of the field."""
    wanted = str(field.type)
    fits = isinstance(value, str) if wanted == _TEXT else isinstance(value, int | float) and not isinstance(value, bool)
    if not fits and not (value is None and "None" in wanted):
        raise TypeError(f"{field.name} is {value!r}")
    return value


@in_sentences("profiling a plan of")
def profile(
    model: nn.Module,
    plan: Plan,
    sample: Any,
    *,
    pairs: int = 5,
    eager: bool | None = None,
    progress: ProgressLike = None,
) -> Profile:
    """Run planned and eager steps in turns and measure; the model stays as it is.

    Ctrl-C between the first pair and the last gives what was measured until then.
    Eager steps are run where they fit the plan's budget; `eager=True` runs them wherever the machine can, `eager=False`
    never does. The optimizer's step is not run; what it keeps is counted as the plan counts it. A function
    `progress(done, total)` is told how many pairs have run; otherwise `progress` is as for `plan`.
    """
    if eager is None:
        eager = plan.budget_bytes is None or plan.unplanned_peak_bytes <= plan.budget_bytes
    if pairs < 1:
        raise InvalidInput(f"at least one pair of steps is needed, {pairs} was given")
    example = Sample.of(sample)
    with (
        alone(),
        progress_line(progress, "measuring peaks") as line,
        removed(model),
        nothing_remains(model, example),
    ):
        eager_peak = _peak(model, example, plan) if eager else None
        apply(plan, model, sample)
        planned = planned_forwards(model)
        try:
            step(model, example, seed=0, backward_from=plan.backward_from)
            peak_bytes = _peak(model, example, plan)
        finally:
            remove(model)
        times: list[tuple[float, float]] = []
        for number in range(pairs):
            try:
                times.append(_pair(model, example, plan, planned, eager=eager, swap=bool(number % 2)))
            except KeyboardInterrupt:
                if not times:
                    raise
                break
            line.counted("running planned and eager steps" if eager else "running planned steps", number + 1, pairs)
    return Profile(
        model=type(model).__name__,
        predicted_peak_bytes=plan.peak_bytes,
        peak_bytes=peak_bytes,
        eager_peak_bytes=eager_peak,
        predicted_slowdown=plan.slowdown,
        slowdown=statistics.median(planned / plain for planned, plain in times) - 1 if eager else None,
        step_s=statistics.median(planned for planned, _ in times),
        pairs=len(times),
        budget_bytes=plan.budget_bytes,
    )


def _peak(model: nn.Module, example: Sample, plan: Plan) -> int:
    def run() -> None:
        step(model, example, seed=0, backward_from=plan.backward_from)

    drop_gradients(model, example)  # else an accelerator gives them back while it is measured
    measured = measure_peak(run, resident=[model, example.args, dict(example.kwargs)])
    return measured.peak_bytes + plan.optimizer_state_bytes


def _pair(
    model: nn.Module, example: Sample, plan: Plan, forwards: Sequence[PlannedForward], *, eager: bool, swap: bool
) -> tuple[float, float]:
    """Seconds of a planned and an eager step, in either order."""
    seconds = {}
    for planned in (swap, not swap):
        if not planned and not eager:
            continue
        if planned:
            put_back(forwards)
        try:
            seconds[planned] = _seconds(lambda: step(model, example, seed=0, backward_from=plan.backward_from), model)
        finally:
            remove(model)
    return seconds[True], seconds.get(False, seconds[True])


def _seconds(run: Callable[[], Any], model: nn.Module) -> float:
    device = device_of(model)
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start
