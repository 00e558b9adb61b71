"""The curve of memory against time: one plan a point."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any, Self

from memfit.display import html_of
from memfit.plan.plan import Plan
from memfit.units import format_bytes

FORMAT = "memfit.frontier"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Plans of one step at several budgets, biggest budget first: the smaller the budget, the slower."""

    plans: tuple[Plan, ...]
    was_interrupted: bool = False  # these are the points that were found until then

    @classmethod
    def of(cls, plans: Iterable[Plan], *, was_interrupted: bool = False) -> Self:
        """The curve through some plans: a plan of a smaller budget that is faster serves the bigger budget too."""
        curve: list[Plan] = []
        for plan in sorted(plans, key=lambda each: each.budget_bytes or each.peak_bytes):
            if curve and curve[-1].extra_us < plan.extra_us:
                bound_us = min(plan.bound_us, curve[-1].extra_us)
                plan = dataclasses.replace(curve[-1], budget_bytes=plan.budget_bytes, bound_us=bound_us)
            curve.append(plan)
        return cls(tuple(reversed(curve)), was_interrupted)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def points(self) -> list[dict[str, Any]]:
        """The curve in numbers: peak, its fraction of the activation part, predicted slowdown and bound."""
        return [
            {
                "budget_bytes": plan.budget_bytes,
                "peak_bytes": plan.peak_bytes,
                "activation_fraction": activation_fraction(plan),
                "slowdown": plan.slowdown,
                "lower_bound": plan.lower_bound,
            }
            for plan in self.plans
        ]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, "points": self.points()}, indent=2)

    def __str__(self) -> str:
        return "\n".join(
            f"{format_bytes(plan.peak_bytes):>12}  {activation_fraction(plan):6.2f} of the activation part  "
            f"{plan.slowdown:+7.1%} time (at best {plan.lower_bound:+.1%})"
            for plan in self.plans
        )

    def _repr_html_(self) -> str | None:
        return html_of(self)


def activation_fraction(plan: Plan) -> float:
    """A plan's peak beyond what lives when the step ends, as a fraction of the unplanned one."""
    part_bytes = plan.unplanned_peak_bytes - plan.persistent_bytes
    return (plan.peak_bytes - plan.persistent_bytes) / part_bytes if part_bytes > 0 else 1.0
