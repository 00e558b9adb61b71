"""Plans, checks and profiles made by hand, without a model."""

import io
from typing import Any

from rich.console import Console

from memfit.ir import Program
from memfit.plan.plan import Fate, Plan, Treatment
from memfit.prove.check import Check, Comparison
from memfit.prove.profile import Profile

MIB = 2**20


def fate(module: str, treatment: Treatment, size_bytes: int = MIB, technique: str = "") -> Fate:
    return Fate(
        value=f"value of {module}", module=module, size_bytes=size_bytes, treatment=treatment, technique=technique
    )


FATES = (
    fate("stem", Treatment.KEPT, 3 * MIB),
    *(fate(f"layers.{number}.conv", Treatment.KEPT) for number in range(4)),
    *(fate(f"layers.{number}.relu", Treatment.AGAIN) for number in (0, 1, 3)),
    fate("layers.2.relu", Treatment.REPLACED, MIB, "bits"),
    fate("", Treatment.KEPT, 8),
)


def make_plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "model": "Net",
        "model_digest": "0123456789abcdef",
        "sample": "x: float32[4, 4]",
        "torch_version": "2.13.0",
        "device": "cpu",
        "optimizer": "adamw",
        "allow": ("recompute", "lean"),
        "rewrites": (),
        "outputs": "all",
        "backward_from": "auto",
        "budget_bytes": 12 * MIB,
        "peak_bytes": 11 * MIB,
        "unplanned_peak_bytes": 20 * MIB,
        "persistent_bytes": 4 * MIB,
        "optimizer_state_bytes": MIB,
        "floor_bytes": 5 * MIB,
        "floor_operation": "aten.convolution_backward.default in layers.0.conv",
        "step_us": 1000.0,
        "extra_us": 64.0,
        "bound_us": 31.0,
        "times_measured": True,
        "plan_seconds": 1.25,
        "log": ("0.0 s: greedy: 6.40% slower",),
        "fates": FATES,
        "program": Program(graph_digest="0", forward=(), backward=()),
    }
    return Plan(**fields | changes)


def make_check(*, equal: int = 3, difference: float = 0.0, tolerance: float = 0.0) -> Check:
    parts = [
        Comparison(part="outputs", compared=1, equal=1, largest_difference=0.0, worst="output 0", beyond_rounding=0.0),
        Comparison(
            part="gradients",
            compared=3,
            equal=equal,
            largest_difference=difference,
            worst="stem.weight",
            beyond_rounding=difference,
        ),
    ]
    return Check(model="Net", seed=7, tolerance=tolerance, comparisons=tuple(parts))


def make_profile(**changes: Any) -> Profile:
    fields: dict[str, Any] = {
        "model": "Net",
        "predicted_peak_bytes": 11 * MIB,
        "peak_bytes": 10 * MIB,
        "eager_peak_bytes": 20 * MIB,
        "predicted_slowdown": 0.064,
        "slowdown": 0.071,
        "step_s": 0.125,
        "pairs": 5,
        "budget_bytes": 12 * MIB,
    }
    return Profile(**fields | changes)


def printed(show: Any, *arguments: Any, width: int = 80, **options: Any) -> str:
    """What a function prints on a console of some width."""
    stream = io.StringIO()
    show(Console(file=stream, width=width), *arguments, **options)
    return stream.getvalue()
