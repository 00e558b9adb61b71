"""What a plan says, as rows and numbers; how they look is decided elsewhere."""

import dataclasses
import json
from collections.abc import Iterator

from memfit.plan.plan import Plan, Treatment, not_counted, region_lines
from memfit.report.blocks import equal_blocks
from memfit.report.breakdown import printable
from memfit.units import format_bytes

OUTSIDE = "(outside of modules)"
_FEWEST_NAMES = 2  # how deep to look at least
_ENOUGH_MODULES = 5  # rows from which on a table by module tells something
_LARGEST_SHARE = 0.5  # of all bytes in one row: above, the row wants to be taken apart


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number of a plan, and what to know about it."""

    label: str
    value: str
    remark: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRow:
    """What happens to the activations of one module, or of equal blocks: bytes by treatment."""

    label: str
    sizes: dict[Treatment, int]


def step_words(plan: Plan) -> str:
    """What was planned."""
    step = f"training step with {plan.optimizer}" if plan.optimizer else "forward and backward"
    return f"{printable(plan.model)}, {step}, on {plan.device}"


def figures(plan: Plan) -> list[Figure]:
    """The numbers of a plan, the asked ones first."""
    return list(_figures(plan))


def _figures(plan: Plan) -> Iterator[Figure]:
    share = f"{plan.peak_bytes / max(1, plan.unplanned_peak_bytes):.0%} of the unplanned peak"
    if plan.budget_bytes is not None:
        yield Figure(label="budget", value=format_bytes(plan.budget_bytes))
    yield Figure(label="predicted peak", value=format_bytes(plan.peak_bytes), remark=share)
    if plan.reserved is not None:
        setting = plan.reserved.best_setting
        best = f"{format_bytes(plan.reserved.best_reserved_bytes)} with {setting}" if setting else ""
        yield Figure(label="predicted reserved", value=format_bytes(plan.reserved.reserved_bytes), remark=best)
    yield Figure(label="unplanned peak", value=format_bytes(plan.unplanned_peak_bytes))
    yield Figure(
        label="floor", value=format_bytes(plan.floor_bytes), remark=f"set by {printable(plan.floor_operation)}"
    )
    how = "times measured here" if plan.times_measured else "times estimated"
    yield Figure(label="predicted slowdown", value=f"{plan.slowdown:+.1%}", remark=how)
    if plan.budget_bytes is not None and not plan.regions:  # what is left eager has no bound
        yield Figure(label="lower bound", value=f"{plan.lower_bound:+.1%}", remark="no plan of this budget is faster")
        yield Figure(label="gap", value=f"{100 * plan.gap:.1f} points")
    yield Figure(label="plan time", value=f"{plan.plan_seconds:.1f} s")


def notes(plan: Plan) -> list[str]:
    """What a reader should know about the figures."""
    return list(_notes(plan))


def _notes(plan: Plan) -> Iterator[str]:
    if left_out := not_counted(plan):
        yield left_out
    if plan.is_identity and plan.budget_bytes is not None:
        yield "the unplanned step fits the budget: nothing is computed again, nothing is replaced"
    if any("interrupted" in line for line in plan.log):
        yield "the search was interrupted: this is the best plan that was found until then"
    yield from (printable(line) for line in region_lines(plan))
    if plan.rewrites:
        yield f"the graph was changed before planning: {', '.join(plan.rewrites)}"
    lossy = [name for name in plan.allow if name.endswith("-bit")]
    if lossy and any(fate.technique in lossy for fate in plan.fates):
        yield f"some values are kept in fewer bits ({', '.join(lossy)}): gradients differ from the eager run"


def automatic_depth(plan: Plan) -> int:
    """How many names deep the modules of this plan begin to tell something."""
    deepest = max((fate.module.count(".") + 1 for fate in plan.fates), default=1)
    fallback = None
    for depth in range(_FEWEST_NAMES, deepest):
        sizes = [sum(by_treatment.values()) for by_treatment in plan.by_module(depth).values()]
        if len(sizes) < _ENOUGH_MODULES:
            continue
        if max(sizes) <= _LARGEST_SHARE * sum(sizes):
            return depth
        fallback = fallback or depth
    return fallback or max(_FEWEST_NAMES, deepest)


def module_rows(plan: Plan, *, depth: int | None = None, top: int = 20) -> list[ModuleRow]:
    """By module, in the order of the model, equal blocks in one row, and one row for those beyond `top`."""
    sizes = {
        printable(module) or OUTSIDE: tuple(by_treatment[each] for each in Treatment)
        for module, by_treatment in plan.by_module(depth or automatic_depth(plan)).items()
    }
    rows = [(label, tuple(count * size for size in each)) for label, each, count in equal_blocks(sizes) if any(each)]
    if len(rows) > top + 1:
        others = rows[top:]
        rows = [
            *rows[:top],
            (f"({len(others)} others)", tuple(map(sum, zip(*(each for _, each in others), strict=True)))),
        ]
    return [ModuleRow(label=label, sizes=dict(zip(Treatment, each, strict=True))) for label, each in rows]


def totals(plan: Plan) -> dict[Treatment, int]:
    """Bytes of all activations by treatment."""
    return {each: sum(fate.size_bytes for fate in plan.fates if fate.treatment is each) for each in Treatment}


def techniques(plan: Plan) -> dict[str, int]:
    """Bytes of what is replaced, by technique."""
    found: dict[str, int] = {}
    for fate in plan.fates:
        if fate.treatment is Treatment.REPLACED:
            found[fate.technique] = found.get(fate.technique, 0) + fate.size_bytes
    return found


def summary_json(plan: Plan, *, depth: int | None = None) -> str:
    """All figures of a plan without its program."""
    left_out = ("program", "fates", "regions", "step")
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    figures = {name: value for name, value in fields.items() if name not in left_out}
    derived = {
        "slowdown": plan.slowdown,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "is_identity": plan.is_identity,
        "reserved": None if plan.reserved is None else plan.reserved.to_dict(),
        "activations": totals(plan),
        "techniques": techniques(plan),
        "modules": plan.by_module(depth or automatic_depth(plan)),
        "regions": {name: _region_json(region) for name, region in plan.regions.items()},
        "notes": notes(plan),
    }
    return json.dumps(figures | derived, indent=2)


def _region_json(region: Plan) -> dict[str, object]:
    return {"model": region.model, "sample": region.sample, "activations": totals(region), "extra_us": region.extra_us}
