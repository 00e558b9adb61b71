"""The first table of the demo: a model trained inside a limit that the system enforces, in which plain PyTorch fails.

Note [The limit of the demo]
    The budget is half of the activations, in allocated bytes. The limit is that budget, what the process is predicted
    to take beside its tensors (code of libraries, threads, captured graphs), what planning leaves behind, and a few
    percent to spare. Plain PyTorch gets the same setting of malloc as memfit, with which a process is smallest. memfit
    starts with an empty cache: all that planning runs is run inside the limit too.
"""

import dataclasses
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from memfit.capture.sample import Sample
from memfit.cli.demo_process import Tagger, Task, Trained, trained_from
from memfit.cli.progress import Display
from memfit.measure.process import can_be_measured
from memfit.pipeline import make_planner
from memfit.plan.expand import program_of
from memfit.prepare import prepare, traced_for
from memfit.process_budget import peak_of_process
from memfit.recipe import Recipe
from memfit.report.tables import plain_table
from memfit.units import format_bytes

_FRACTION = 0.5  # of the activations
_TO_SPARE = 0.04  # of the limit
_PLANNING_BYTES = 24 * 2**20  # what planning leaves in the process that it runs in: modules, threads, a solver
_OPTIMIZER = "adamw"
_CHILD = "memfit.cli.demo_process"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitCase:
    """A model by name."""

    name: str
    model: Tagger

    @property
    def missing(self) -> str:
        """Say why it cannot run here; empty if it can."""
        is_there = platform.libc_ver()[0] == "glibc" and can_be_measured("cpu")
        return "" if is_there else "a hard limit of a process needs Linux with glibc"


CASE = LimitCase(
    name="Transformer",
    model=Tagger(words=4096, width=256, heads=4, layers=6, classes=16, batch_size=16, tokens=128),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitResult:
    """Three processes that train the same steps."""

    case: LimitCase
    budget_bytes: int  # of allocated bytes
    unplanned_bytes: int  # what a plain step allocates, predicted
    limit_bytes: int  # for everything beyond what the process has after its imports
    unlimited: Trained  # plain PyTorch without a limit
    plain: Trained  # plain PyTorch in the limit
    planned: Trained  # memfit in the limit

    @property
    def equal(self) -> bool:
        """Return whether losses and weights are those of plain PyTorch, bit for bit."""
        same_losses = self.planned.losses == self.unlimited.losses
        return bool(self.planned.losses) and same_losses and self.planned.weights == self.unlimited.weights

    @property
    def kept_promises(self) -> bool:
        return bool(self.plain.failure) and not self.planned.failure and self.equal

    def to_json(self) -> str:
        fields = dataclasses.asdict(self) | {"equal": self.equal, "kept_promises": self.kept_promises}
        return json.dumps({"format": "memfit.demo_limit", "version": 1} | fields, indent=2)


def run_limited(case: LimitCase, *, steps: int, time_limit_s: float, seed: int, shown: Display) -> LimitResult:
    """Choose a limit, and train in three processes."""
    shown.doing(f"{case.name}: predicting what a process takes")
    budget_bytes, unplanned_bytes, limit_bytes = choose_limit(case, seed)
    plain = Task(model=case.model, steps=steps, seed=seed)
    plain_in_limit = dataclasses.replace(plain, limit_bytes=limit_bytes, releases=True)
    planned_in_limit = dataclasses.replace(plain_in_limit, budget_bytes=budget_bytes, time_limit_s=time_limit_s)
    shown.doing(f"{case.name}: plain PyTorch without a limit")
    unlimited = _in_process(plain)
    shown.doing(f"{case.name}: plain PyTorch in {format_bytes(limit_bytes)}")
    failing = _in_process(plain_in_limit)
    shown.doing(f"{case.name}: planning and training with memfit in {format_bytes(limit_bytes)}")
    return LimitResult(
        case=case,
        budget_bytes=budget_bytes,
        unplanned_bytes=unplanned_bytes,
        limit_bytes=limit_bytes,
        unlimited=unlimited,
        plain=failing,
        planned=_in_process(planned_in_limit),
    )


def choose_limit(case: LimitCase, seed: int) -> tuple[int, int, int]:
    """Return a budget, what the unplanned step allocates, and the limit; see Note [The limit of the demo]."""
    torch.manual_seed(seed)
    model, sample = case.model.build(), Sample((case.model.batch()[0],))
    recipe = Recipe(budget=_FRACTION, optimizer=_OPTIMIZER)
    with traced_for(model, sample, recipe) as joint:
        prepared = prepare(model, joint, sample, recipe, timed=False)
    planner = make_planner(model, prepared, recipe)
    program = program_of(planner.problem, planner.unplanned)
    unplanned_bytes = prepared.unplanned_peak_bytes
    budget_bytes = prepared.persistent_bytes + int(_FRACTION * (unplanned_bytes - prepared.persistent_bytes))
    process = peak_of_process(prepared, program, planned=True)
    beside_bytes = process.mapped_bytes - prepared.peak_bytes(program)
    limit_bytes = (1 + _TO_SPARE) * (budget_bytes + beside_bytes) + _PLANNING_BYTES
    return budget_bytes, unplanned_bytes, math.ceil(limit_bytes / 2**20) * 2**20


def _in_process(task: Task) -> Trained:
    """Run a task in a process of its own, with nothing remembered from earlier runs."""
    command = [sys.executable, "-W", "ignore", "-m", _CHILD, json.dumps(dataclasses.asdict(task))]
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment() | {"MEMFIT_CACHE_DIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return Trained(failure=f"ended with code {done.returncode}: {last}")
    return trained_from(json.loads(done.stdout.splitlines()[-1]))


def _environment() -> dict[str, str]:
    """Return the environment, in which a process finds this memfit wherever it is started."""
    paths = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def print_limited(console: Console, result: LimitResult) -> None:
    """Return what became of three processes, a column for each."""
    limit = format_bytes(result.limit_bytes)
    table = plain_table(f"{result.case.name} x{result.case.model.batch_size} under a hard limit of the process")
    table.add_column("", no_wrap=True)
    for heading in ("PyTorch", "PyTorch", "memfit"):
        table.add_column(heading, justify="right", no_wrap=True)
    columns = (result.unlimited, result.plain, result.planned)
    rows = {
        "limit, above imports": ["none", limit, limit],
        "trained": ["fails" if each.failure else f"{len(each.losses)} steps" for each in columns],
        "peak of the process": [_unless_failed(each, format_bytes(each.peak_bytes)) for each in columns],
        "planning": ["-", "-", _unless_failed(result.planned, f"{result.planned.planning_s:.1f} s")],
        "a step takes": [_unless_failed(each, _step_words(each)) for each in columns],
        "loss after the last step": [_unless_failed(each, _loss_words(each)) for each in columns],
        "equal losses and weights": ["-", "-", "yes" if result.equal else "NO"],
    }
    for label, cells in rows.items():
        table.add_row(label, *(Text(cell, style="bold red" if cell == "NO" else "") for cell in cells))
    console.print(table)
    for name, each in (("PyTorch", result.plain), ("memfit", result.planned)):
        if each.failure:
            console.print(f"{name} in {limit}: {each.failure}", highlight=False, markup=False)
    if not result.plain.failure:
        console.print(f"PyTorch in {limit} did NOT fail, so the limit shows nothing", highlight=False)


def _unless_failed(trained: Trained, words: str) -> str:
    return "-" if trained.failure else words


def _step_words(trained: Trained) -> str:
    return f"{statistics.median(trained.step_s):.2f} s" if trained.step_s else ""


def _loss_words(trained: Trained) -> str:
    return f"{trained.losses[-1]:.6f}" if trained.losses else ""
