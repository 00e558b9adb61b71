"""One family in a process of its own: captured, compared, fitted. Prints one line of JSON."""

import dataclasses
import json
import sys
import time
import warnings
from typing import Any

import torch

import memfit
from benchmarks.family_models import Family, families
from memfit.cli.torchvision_repair import prepare

WHOLE, REGIONS, REFUSED, CRASHED = "whole", "regions", "refused", "crashed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyResult:
    """What became of one architecture."""

    name: str
    library: str
    captured: str
    reason: str = ""  # why not whole
    exact: bool | None = None
    difference: float | None = None  # the largest, where it is not exact, relative to its tensor
    beyond_rounding: float | None = None  # the same, without what one float rounds of the largest gradient
    half_bytes: int | None = None  # half of the activation part
    budget_bytes: int | None = None  # the one that was met: half, or the smallest
    peak_bytes: int | None = None  # measured
    eager_peak_bytes: int | None = None
    slowdown: float | None = None
    predicted_slowdown: float | None = None
    rounds_differently: bool = False  # captured the way its library offers for traces
    seconds: float = 0.0


def run_family(family: Family) -> FamilyResult:
    """Capture, plan for half of the activations, check, profile."""
    start = time.monotonic()
    torch.manual_seed(0)
    model, sample = family.make()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            result = _fitted(family, model, sample)
        except memfit.MemfitError as error:
            result = FamilyResult(name=family.name, library=family.library, captured=REFUSED, reason=str(error))
    avoided = any("looks at values" in str(each.message) for each in said)
    return dataclasses.replace(result, seconds=round(time.monotonic() - start, 1), rounds_differently=avoided)


def _fitted(family: Family, model: torch.nn.Module, sample: Any) -> FamilyResult:
    curve = memfit.frontier(model, sample, fractions=(0.5,), time_limit=12.0)
    plan = max(curve.plans, key=lambda each: each.budget_bytes or 0)
    check = memfit.check(model, plan, sample)
    profile = memfit.profile(model, plan, sample, pairs=5, eager=True)
    reason = plan.left_eager.get("", "") if plan.regions else ""
    half = plan.persistent_bytes + (plan.unplanned_peak_bytes - plan.persistent_bytes) // 2
    return FamilyResult(
        name=family.name,
        library=family.library,
        captured=REGIONS if plan.regions else WHOLE,
        reason=reason,
        exact=check.exact,
        difference=None if check.exact else max(each.largest_difference for each in check.comparisons),
        beyond_rounding=None if check.exact else max(each.beyond_rounding for each in check.comparisons),
        half_bytes=half,
        budget_bytes=plan.budget_bytes,
        peak_bytes=profile.peak_bytes,
        eager_peak_bytes=profile.eager_peak_bytes,
        slowdown=profile.slowdown,
        predicted_slowdown=plan.slowdown,
    )


def main() -> None:
    torch.set_num_threads(1)  # tiny steps are faster on one
    prepare()
    name = sys.argv[1]
    family = next(each for each in families() if each.name == name)
    try:
        result = run_family(family)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        result = FamilyResult(name=name, library=family.library, captured=CRASHED, reason=reason[:2000])
    print(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    main()
