"""Planning inside the budget: what it allocates, how long it takes, and how good the plans are.

    python -m benchmarks.inside               # the nine models and DenseNet-121
    python -m benchmarks.inside resnet bert   # models whose name contains one of the words

For each model a process of its own fits it to the middle between the smallest plan's peak and the unplanned one, where
the unplanned step does not fit, from an empty cache and again from a full one. It records the allocator over the whole
of `fit`. Then a second plan is made for the same budget from times of unplanned steps, as if they fitted, and steps of
both plans and of the eager model run in turns. The process keeps freed memory, so that page faults do not hide the
operators. Results are added to those of earlier runs.
"""

import argparse
import contextlib
import copy
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

import memfit
from benchmarks.malloc import MALLOC_SETTINGS
from benchmarks.measuring import Subject, peak_bytes, ratio, taking_turns
from benchmarks.models import Case, _vision, frontier_cases
from memfit.capture.sample import Sample
from memfit.files import write_atomically
from memfit.machine import processor
from memfit.measure.peak import measure_peak
from memfit.pipeline import StepPlanner, with_times_within
from memfit.plan.plan import Plan
from memfit.prepare import prepare, traced_for
from memfit.recipe import Recipe
from memfit.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "inside.json"
ROUNDS, SECONDS = 5, 8.0
_MARK = "result "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Hold the figures of one model."""

    case: str
    budget_bytes: int
    unplanned_bytes: int
    planning_bytes: int  # the peak over the whole of `fit`
    measured_bytes: int  # the peak of a step
    predicted_slowdown: float
    slowdown: float
    error: float  # standard error of that
    to_plan_where_it_fits: float  # time of a step to that of a plan made from unplanned steps
    cold_s: float  # of `fit`
    warm_s: float
    step_s: float  # of the eager model
    date: str
    processor: str
    commit: str


def main() -> None:
    options = _options()
    if options.one is not None:
        print(_MARK + json.dumps(dataclasses.asdict(_measured(options.one))))
        return
    known = {each["case"]: Row(**each) for each in _saved()}
    for case in cases():
        if not options.words or any(word.lower() in str(case).lower() for word in options.words):
            known[str(case)] = _in_own_process(str(case))
            rows = [dataclasses.asdict(known[str(each)]) for each in cases() if str(each) in known]
            write_atomically(RESULTS, json.dumps(rows, indent=1) + "\n")
            print(f"{case}: done", flush=True)
    Console(width=None if sys.stdout.isatty() else 170).print(_table(list(known.values())))


def cases() -> list[Case]:
    return [*frontier_cases(), _vision("DenseNet-121", "densenet121", 128, 4)]


def _measured(name: str) -> Row:
    subject = Subject.of(next(each for each in cases() if str(each) == name))
    case, sample = subject.case, subject.case.sample(subject.batch)
    options: dict[str, Any] = {} if case.outputs is None else {"outputs": case.outputs}
    budget = _middle(subject, options)
    fitted = copy.deepcopy(subject.model)
    with _empty_cache():
        start = time.monotonic()
        memfit.fit(fitted, sample, budget, **options)
        cold_s = time.monotonic() - start
        memfit.remove(fitted)
        start = time.monotonic()
        memfit.fit(fitted, sample, budget, **options)
        warm_s = time.monotonic() - start
    plan = memfit.plan_of(fitted)
    assert plan is not None
    other = memfit.apply(_plan_where_it_fits(subject, budget, options), copy.deepcopy(subject.model), sample)
    with _empty_cache():
        watched = copy.deepcopy(subject.model)
        seen = measure_peak(lambda: memfit.fit(watched, sample, budget, **options), resident=[watched, subject.batch])
    own_s, other_s, eager_s = taking_turns(subject, [fitted, other, subject.model], rounds=ROUNDS, seconds=SECONDS)
    slowdown, error = ratio(own_s, eager_s)
    return Row(
        case=name,
        budget_bytes=budget,
        unplanned_bytes=plan.unplanned_peak_bytes,
        planning_bytes=seen.peak_bytes,
        measured_bytes=peak_bytes(subject, fitted),
        predicted_slowdown=plan.slowdown,
        slowdown=slowdown - 1,
        error=error,
        to_plan_where_it_fits=ratio(own_s, other_s)[0],
        cold_s=cold_s,
        warm_s=warm_s,
        step_s=min(eager_s),
        date=datetime.date.today().isoformat(),
        processor=processor().partition("  ")[0][:60],
        commit=_commit(),
    )


def _middle(subject: Subject, options: dict[str, Any]) -> int:
    """The middle between the smallest plan's peak and the unplanned one."""
    sample = subject.case.sample(subject.batch)
    with _empty_cache():
        smallest = memfit.plan(subject.model, sample, budget="smallest", time_limit=4, **options)
    assert smallest.budget_bytes is not None
    return (smallest.budget_bytes + smallest.unplanned_peak_bytes) // 2


def _plan_where_it_fits(subject: Subject, budget: int, options: dict[str, Any]) -> Plan:
    """A plan for the budget from times of unplanned steps."""
    example = Sample.of(subject.case.sample(subject.batch))
    recipe = Recipe(budget=budget, **options)
    with _empty_cache(), traced_for(subject.model, example, recipe) as joint:
        prepared = prepare(subject.model, joint, example, recipe)
        timed = with_times_within(subject.model, joint, example, prepared, recipe, None)
        return StepPlanner(subject.model, joint, example, recipe, timed).plan(recipe)


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    """Forget for a while what earlier runs measured."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, MEMFIT_CACHE_DIR=folder):
        yield


def _in_own_process(name: str) -> Row:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.inside", "--one", name]
    done = subprocess.run(command, env=os.environ | MALLOC_SETTINGS, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(_MARK))
    return Row(**json.loads(line.removeprefix(_MARK)))


def _saved() -> list[dict[str, Any]]:
    saved: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return saved


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _table(rows: list[Row]) -> Table:
    table = Table(title="Planning inside the budget", title_justify="left")
    headings = (
        "case",
        "budget",
        "unplanned",
        "while planning",
        "step",
        "predicted",
        "measured",
        "to plan where it fits",
    )
    for heading in (*headings, "fit, cold", "fit, warm", "eager step"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        table.add_row(
            row.case,
            format_bytes(row.budget_bytes),
            format_bytes(row.unplanned_bytes),
            format_bytes(row.planning_bytes),
            format_bytes(row.measured_bytes),
            f"{row.predicted_slowdown:+.1%}",
            f"{row.slowdown:+.1%} ±{row.error:.1%}",
            f"{row.to_plan_where_it_fits:.3f}",
            f"{row.cold_s:.1f} s",
            f"{row.warm_s:.1f} s",
            f"{row.step_s:.2f} s",
        )
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What planning inside the budget takes and gives.")
    parser.add_argument("words", nargs="*", help="parts of names of models")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
