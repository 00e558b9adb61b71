"""Whether stored plans still are what they say: same graph, same peak.

Note [What is checked]
    The model is built without weights and captured as it is today; plans of one step share the capture. A plan holds
    if the captured graph has the plan's digest, its instructions can be followed in it, and walking them gives the
    stored peak: to the byte for devices that are not here, for which nothing is measured, and within 1% on the CPU,
    where operators are run to learn what they allocate inside. Times are not checked.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memfit.capture.sample import Sample
from memfit.errors import MemfitError, first_line
from memfit.measure.devices import find_device
from memfit.pipeline import Prepared, Recipe, model_digest, prepare, traced_for
from memfit.plan.plan import Plan
from memfit.plan.validate import check_program
from memfit.units import format_bytes
from memfit.zoo.entry import Entry
from memfit.zoo.store import open_plan

_TOLERANCE_HERE = 0.01  # what operators allocate inside depends on the processor

Make = Callable[[Entry], tuple[nn.Module, Sample]]  # the step of an entry, without weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found about one plan."""

    name: str
    reason: str  # why it does not hold; empty: it holds
    peak_bytes: int | None  # by simulation; None: not reached
    seconds: float

    @property
    def holds(self) -> bool:
        return not self.reason


def verify(wanted: Iterable[Entry], make: Make, *, open_one: Callable[[str], Plan] = open_plan) -> Iterator[Verdict]:
    """Check plans one by one; `make` builds the model and sample of an entry without weights."""
    in_order = sorted(wanted, key=lambda each: repr(each.step))
    for _, group in itertools.groupby(in_order, key=lambda each: each.step):
        yield from _verify_step(list(group), make, open_one)


def _verify_step(group: list[Entry], make: Make, open_one: Callable[[str], Plan]) -> Iterator[Verdict]:
    """Plans of one captured step."""
    start = time.monotonic()
    prepared: Prepared | None = None
    digest = problem = ""
    for entry in group:
        reason, peak_bytes = problem, None
        try:
            plan = open_one(entry.name)
            if prepared is None and not problem:
                prepared, digest = _prepared(entry, plan, make)
            if prepared is not None:
                peak_bytes = _check(entry, plan, prepared, digest)
        except _DoesNotHold as error:
            reason, peak_bytes = str(error), error.peak_bytes
        except MemfitError as error:
            reason = first_line(error)
            problem = reason if prepared is None else ""  # the others of this step fail the same way
        yield Verdict(name=entry.name, reason=reason, peak_bytes=peak_bytes, seconds=time.monotonic() - start)
        start = time.monotonic()


def _prepared(entry: Entry, plan: Plan, make: Make) -> tuple[Prepared, str]:
    recipe = Recipe(
        budget=plan.budget_bytes,
        optimizer=plan.optimizer,
        allow=plan.allow,
        outputs=plan.outputs,
        backward_from=plan.backward_from,
        device=None if entry.device == "cpu" else find_device(entry.device),
    )
    model, sample = make(entry)
    with traced_for(model, sample, recipe) as joint:
        return prepare(model, joint, sample, recipe, timed=False), model_digest(model)


class _DoesNotHold(Exception):
    def __init__(self, reason: str, peak_bytes: int | None = None) -> None:
        super().__init__(reason)
        self.peak_bytes = peak_bytes


def _check(entry: Entry, plan: Plan, prepared: Prepared, digest: str) -> int:
    if plan.model_digest != digest:
        raise _DoesNotHold("the model has other parameters or buffers today")
    found: Any = prepared.graph.digest()
    if found != plan.program.graph_digest or found != entry.graph_digest:
        raise _DoesNotHold(
            f"the model computes something else today: graph {found}, planned for {plan.program.graph_digest} "
            f"(torch {plan.torch_version} then, {torch.__version__} now)"
        )
    check_program(prepared.graph, plan.program)
    peak_bytes = prepared.peak_bytes(plan.program)
    allowed_bytes = plan.peak_bytes * _TOLERANCE_HERE if entry.device == "cpu" else 0
    if abs(peak_bytes - plan.peak_bytes) > allowed_bytes or plan.peak_bytes != entry.peak_bytes:
        raise _DoesNotHold(
            f"its peak is {format_bytes(peak_bytes)} by simulation, {format_bytes(plan.peak_bytes)} in the plan and "
            f"{format_bytes(entry.peak_bytes)} in the list",
            peak_bytes,
        )
    return peak_bytes
