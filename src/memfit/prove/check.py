"""Whether a planned step computes what the eager step computes: outputs, gradients, buffers, generator."""

import dataclasses
import json
from typing import Any

from torch import nn

from memfit.alone import alone
from memfit.capture.sample import Sample
from memfit.errors import InvalidInput
from memfit.execute.attach import removed
from memfit.internal import in_sentences
from memfit.plan.plan import Plan
from memfit.progress import ProgressLike, progress_line
from memfit.prove.comparison import Comparison
from memfit.prove.eager import AS_IT_IS, EagerComparison
from memfit.recipe import EXACT

__all__ = ["Check", "Comparison", "check"]

_ROUNDED_DIFFERENTLY = 1e-6  # what a technique that only sums in another order may change, relative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of comparing a planned step with the eager one."""

    model: str
    seed: int
    tolerance: float  # 0: bit for bit
    comparisons: tuple[Comparison, ...]
    how: str = AS_IT_IS  # how the eager step was run, and what was not compared

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
        return "\n".join([*lines, f"  {self.how}"])


@in_sentences("checking a plan of")
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
    unless given. Lossy techniques need a tolerance to be judged by. Nothing takes more memory than the plan's budget:
    an eager step that does not fit keeps its saved tensors in a file in TMPDIR, and where not even that fits, a part of
    the batch is compared. What two eager steps make differently is left out. `Check.how` says what was done.
    `progress` is as for `plan`.
    """
    lossy = [each for each in plan.allow if each.endswith("-bit")]
    if tolerance is None and lossy:
        raise InvalidInput(f"the plan allows {', '.join(lossy)}, which is lossy; say what to tolerate: tolerance=0.01")
    if tolerance is None:
        tolerance = tolerated(plan)
    with alone(), progress_line(progress, "running an eager and a planned step"), removed(model):
        comparisons, how = EagerComparison(model, plan, Sample.of(sample), seed).run()
    return Check(model=type(model).__name__, seed=seed, tolerance=tolerance, comparisons=comparisons, how=how)


def tolerated(plan: Plan) -> float:
    """Return what the techniques of a plan may change: nothing, or the order of sums."""
    return 0.0 if set(plan.allow) <= set(EXACT) else _ROUNDED_DIFFERENTLY


def _verdict(check: Check) -> str:
    if check.exact:
        return "equal bit for bit"
    return "within tolerance" if check.passed else "DIFFERENT"
