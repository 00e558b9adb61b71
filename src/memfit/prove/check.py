"""Whether a planned step computes what the eager step computes: outputs, gradients, buffers, generator."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from memfit.api import apply
from memfit.capture.rehearse import Result, result_of
from memfit.capture.sample import Sample
from memfit.errors import InvalidInput
from memfit.execute.attach import remove, removed
from memfit.plan.plan import Plan
from memfit.progress import ProgressLike, progress_line
from memfit.recipe import EXACT
from memfit.tensors import same_bits

_ONE_FLOAT = torch.finfo(torch.float32).eps
_ROUNDED_DIFFERENTLY = 1e-6  # what a technique that only sums in another order may change, relative


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How one part of the planned step compares with the eager one."""

    part: str  # "outputs", "gradients", "buffers", "generator"
    compared: int  # tensors
    equal: int  # of them bit for bit
    largest_difference: float  # relative to the largest number of the same eager tensor
    worst: str  # where that is
    beyond_rounding: float  # the same; of gradients without what is below one float's rounding of the largest of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of comparing a planned step with the eager one."""

    model: str
    seed: int
    tolerance: float  # 0: bit for bit
    comparisons: tuple[Comparison, ...]

    @property
    def exact(self) -> bool:
        """Whether everything is equal bit for bit."""
        return all(each.equal == each.compared for each in self.comparisons)

    @property
    def passed(self) -> bool:
        """Whether everything is within the tolerance."""
        return self.exact or all(each.largest_difference <= self.tolerance for each in self.comparisons)

    def to_json(self) -> str:
        fields = dataclasses.asdict(self) | {"exact": self.exact, "passed": self.passed}
        return json.dumps({"format": "memfit.check", "version": 1} | fields, indent=2)

    def __str__(self) -> str:
        rule = "bit for bit" if self.tolerance == 0 else f"within {self.tolerance:g}"
        lines = [f"{self.model}, planned against eager from seed {self.seed}, {rule}: {_verdict(self)}"]
        for each in self.comparisons:
            where = "" if each.equal == each.compared else f", largest {each.largest_difference:.1e} in {each.worst}"
            lines.append(f"  {each.part}: {each.equal} of {each.compared} equal{where}")
        return "\n".join(lines)


def check(
    model: nn.Module,
    plan: Plan,
    sample: Any,
    *,
    seed: int = 0,
    tolerance: float | None = None,
    progress: ProgressLike = None,
) -> Check:
    """Run an eager and a planned step from one seed and compare all they make; the model stays as it is.

    The tolerance is 0 (bit for bit) for plans of exact techniques and 1e-6 for those that sum in another order,
    unless given. Lossy techniques need a tolerance to be judged by. `progress` is as for `plan`.
    """
    lossy = [each for each in plan.allow if each.endswith("-bit")]
    if tolerance is None and lossy:
        raise InvalidInput(f"the plan allows {', '.join(lossy)}, which is lossy; say what to tolerate: tolerance=0.01")
    if tolerance is None:
        tolerance = 0.0 if set(plan.allow) <= set(EXACT) else _ROUNDED_DIFFERENTLY
    example = Sample.of(sample)
    with progress_line(progress, "running an eager step") as line, removed(model):
        eager = result_of(model, example, seed=seed, backward_from=plan.backward_from)
        line.doing("running the planned step")
        apply(plan, model, sample)
        try:
            planned = result_of(model, example, seed=seed, backward_from=plan.backward_from)
        finally:
            remove(model)
    return Check(model=type(model).__name__, seed=seed, tolerance=tolerance, comparisons=_compared(eager, planned))


def _compared(eager: Result, planned: Result) -> tuple[Comparison, ...]:
    parts = [field.name for field in dataclasses.fields(Result)]
    return tuple(_comparison(part, getattr(eager, part), getattr(planned, part)) for part in parts)


def _comparison(part: str, eager: Mapping[str, torch.Tensor], planned: Mapping[str, torch.Tensor]) -> Comparison:
    names = dict.fromkeys((*eager, *planned))
    differences = {name: _difference(eager.get(name), planned.get(name)) for name in names}
    worst = max(differences, key=lambda name: differences[name] or 0.0, default="")
    noise = _ONE_FLOAT * max(map(_largest, eager.values()), default=0.0) if part == "gradients" else 0.0
    beyond = [each for name, each in differences.items() if each and not _is_noise(each, eager.get(name), noise)]
    return Comparison(
        part=part,
        compared=len(names),
        equal=sum(difference is None for difference in differences.values()),
        largest_difference=differences.get(worst) or 0.0,
        worst=worst,
        beyond_rounding=max(beyond, default=0.0),
    )


def _difference(eager: torch.Tensor | None, planned: torch.Tensor | None) -> float | None:
    """None if equal bit for bit, NaN where NaN is; infinite if one is missing or of another kind."""
    if eager is None or planned is None or (eager.shape, eager.dtype) != (planned.shape, planned.dtype):
        return math.inf
    if same_bits(eager, planned):
        return None
    largest = _largest(eager)
    difference = float((eager.double() - planned.double()).abs().nan_to_num(nan=math.inf).max())
    return difference / largest if largest else difference


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite number."""
    numbers = tensor.double().abs()
    return float(numbers.where(numbers.isfinite(), 0.0).max()) if tensor.numel() else 0.0


def _is_noise(difference: float, eager: torch.Tensor | None, noise: float) -> bool:
    """Whether a relative difference is a tiny one: the gradient of a key's bias is zero but for rounding."""
    return eager is not None and difference * (_largest(eager) or 1.0) <= noise


def _verdict(check: Check) -> str:
    if check.exact:
        return "equal bit for bit"
    return "within tolerance" if check.passed else "DIFFERENT"
