"""Train under limits that the system enforces, and compare predictions of the process with what it took.

    python -m benchmarks.hard_limits             # the nine models
    python -m benchmarks.hard_limits lstm gpt    # models whose name contains one of the words
    python -m benchmarks.hard_limits --fit       # plan inside the limit too
    python -m benchmarks.hard_limits --default   # malloc as it comes, instead of `release_freed_memory`

For each model a process plans for the middle between the smallest plan's peak and the unplanned one, and predicts the
peak of a process that trains by that plan and of one that trains plainly. Others then train three steps with SGD and
momentum: without a limit, to see the high-water mark of each, and under `RLIMIT_DATA`, set to what the process has
before the model is built and 1.05 times what is predicted to be mapped for the plan. There the plain step should fail
and the planned one succeed.
"""

import argparse
import dataclasses
import gc
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import memfit
from benchmarks.arguments import words_and_results
from benchmarks.models import Case, frontier_cases
from memfit.capture.sample import Sample
from memfit.cli.torchvision_repair import prepare as repair_torchvision
from memfit.files import write_atomically
from memfit.measure.process import process_peak
from memfit.measure.process_status import high_water_bytes, reset_high_water, resident_bytes, status_bytes
from memfit.plan.identity import identity_program
from memfit.prepare import prepare, traced_for
from memfit.recipe import Recipe
from memfit.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "hard_limits.json"
STEPS = 3
MARGIN = 1.05  # of what is predicted
OPTIMIZER = "sgd"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Hold the predictions for a case, by allocated bytes and by those of the process."""

    planned_bytes: int
    unplanned_bytes: int
    planned_process_bytes: int
    unplanned_process_bytes: int
    planned_mapped_bytes: int  # what `RLIMIT_DATA` counts
    unplanned_mapped_bytes: int
    parts: dict[str, int]  # of the planned process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Hold the outcome of a process that trained."""

    rise_bytes: int | None  # its high-water mark beyond its rest; None: it failed
    failure: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One case."""

    case: str
    malloc: str
    prediction: Prediction
    planned: Training
    unplanned: Training
    planned_in_limit: Training
    unplanned_in_limit: Training

    @property
    def planned_error(self) -> float | None:
        """By how much the prediction is too high, as a fraction."""
        return _error(self.prediction.planned_process_bytes, self.planned)

    @property
    def unplanned_error(self) -> float | None:
        return _error(self.prediction.unplanned_process_bytes, self.unplanned)


def main() -> None:
    options = _options()
    repair_torchvision()
    cases = {str(case): case for case in frontier_cases()}
    if options.predict is not None:
        print(json.dumps(dataclasses.asdict(_predict(cases[options.predict], options.plan))))
        return
    if options.train is not None:
        print(json.dumps(dataclasses.asdict(_train(cases[options.train], options))))
        return
    console = Console(width=None if sys.stdout.isatty() else 150)
    rows = {row.case: row for row in _rows_of(options.results)}
    for name in cases:
        if options.words and not any(word.lower() in name.lower() for word in options.words):
            continue
        rows[name] = _measured(name, options)
        console.print(_line(rows[name]), highlight=False)
        found = [dataclasses.asdict(rows[each]) for each in cases if each in rows]
        write_atomically(options.results, json.dumps(found, indent=1))
    console.print(_table([rows[each] for each in cases if each in rows]))


def _rows_of(path: Path) -> list[Row]:
    """Read what earlier runs have measured."""
    if not path.exists():
        return []
    trained = ("planned", "unplanned", "planned_in_limit", "unplanned_in_limit")
    return [
        Row(
            case=each["case"],
            malloc=each["malloc"],
            prediction=Prediction(**each["prediction"]),
            **{name: Training(**each[name]) for name in trained},
        )
        for each in json.loads(path.read_text())
    ]


def _measured(name: str, options: argparse.Namespace) -> Row:
    malloc = ["--default"] if options.default else []
    with tempfile.TemporaryDirectory() as folder:
        plan = ["--plan", str(Path(folder, "plan.json"))]
        prediction = Prediction(**_child(["--predict", name, *plan]))
        limit = ["--limit", str(int(MARGIN * prediction.planned_mapped_bytes))]
        by_plan = ["--fit-budget", str(prediction.planned_bytes)] if options.fit else plan
        return Row(
            case=name,
            malloc="as it comes" if options.default else "releases",
            prediction=prediction,
            planned=_trained(name, [*malloc, *plan]),
            unplanned=_trained(name, malloc),
            planned_in_limit=_trained(name, [*malloc, *by_plan, *limit]),
            unplanned_in_limit=_trained(name, [*malloc, *limit]),
        )


def _trained(name: str, arguments: list[str]) -> Training:
    try:
        return Training(**_child(["--train", name, *arguments]))
    except RuntimeError as error:  # libraries do not all survive an allocation that fails
        return Training(rise_bytes=None, failure=str(error))


def _child(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.hard_limits", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise RuntimeError(f"ended with code {done.returncode}: {last[:200]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _predict(case: Case, path: Path) -> Prediction:
    """Plan for the middle, write the plan and predict both processes."""
    torch.manual_seed(0)
    model, batch = case.make_model().train(), case.make_batch(case.batch_size)
    sample, outputs = case.sample(batch), case.outputs or "all"

    def planned(budget: int | str) -> memfit.Plan:
        return memfit.plan(model, sample, budget=budget, optimizer=OPTIMIZER, outputs=outputs, time_limit=4.0)

    smallest = planned("smallest")
    plan = planned((smallest.peak_bytes + smallest.unplanned_peak_bytes) // 2)
    recipe = Recipe(budget=plan.budget_bytes, optimizer=OPTIMIZER, outputs=outputs)
    example = Sample.of(sample)
    with traced_for(model, example, recipe) as joint:
        prepared = prepare(model, joint, example, recipe, timed=False)
    by_plan = process_peak(
        prepared.graph,
        plan.program,
        workspace_bytes=prepared.costs.workspace_bytes,
        optimizer=prepared.optimizer,
        planned=True,
    )
    eager = process_peak(
        prepared.eager,
        identity_program(prepared.eager),
        workspace_bytes=prepared.eager_workspace_bytes,
        optimizer=prepared.optimizer,
        planned=False,
    )
    dataclasses.replace(plan, process_peak_bytes=by_plan.peak_bytes).save(path)
    return Prediction(
        planned_bytes=plan.peak_bytes,
        unplanned_bytes=plan.unplanned_peak_bytes,
        planned_process_bytes=by_plan.peak_bytes,
        unplanned_process_bytes=eager.peak_bytes,
        planned_mapped_bytes=by_plan.mapped_bytes,
        unplanned_mapped_bytes=eager.mapped_bytes,
        parts=dict(by_plan.parts),
    )


def _train(case: Case, options: argparse.Namespace) -> Training:
    """Train three steps, in the limit if there is one."""
    if not options.default:
        memfit.release_freed_memory()
    plan = None if options.plan is None else memfit.Plan.load(options.plan)
    with torch.device("meta"):
        case.make_model()  # imports the library that it is from
    gc.collect()
    rest_bytes = resident_bytes()
    if options.limit is not None:
        most_bytes = status_bytes("VmData") + options.limit
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    reset_high_water()
    try:
        _steps(case, plan, options.fit_budget)
    except (MemoryError, RuntimeError) as error:
        return Training(rise_bytes=None, failure=f"{type(error).__name__}: {str(error).splitlines()[0][:150]}")
    return Training(rise_bytes=high_water_bytes() - rest_bytes)


def _steps(case: Case, plan: memfit.Plan | None, budget: int | None) -> None:
    torch.manual_seed(0)
    model, batch = case.make_model().train(), case.make_batch(case.batch_size)
    if plan is not None:
        memfit.apply(plan, model, case.sample(batch))
    elif budget is not None:
        outputs = case.outputs or "all"
        memfit.fit(model, case.sample(batch), budget, optimizer=OPTIMIZER, outputs=outputs, time_limit=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        case.loss(model, batch).backward()
        optimizer.step()


def _error(predicted_bytes: int, training: Training) -> float | None:
    return None if training.rise_bytes is None else predicted_bytes / training.rise_bytes - 1


def _line(row: Row) -> str:
    in_limit = "succeeds" if row.planned_in_limit.rise_bytes is not None else f"fails ({row.planned_in_limit.failure})"
    plain = "succeeds" if row.unplanned_in_limit.rise_bytes is not None else "fails"
    return (
        f"{row.case}: process predicted within {_percent(row.planned_error)} planned, "
        f"{_percent(row.unplanned_error)} plain; in the limit the plan {in_limit}, the plain step {plain}"
    )


def _table(rows: list[Row]) -> Table:
    table = Table(title="Peaks of processes beyond their rest, and steps under RLIMIT_DATA")
    headings = ("case", "tensors", "process predicted", "measured", "off by", "plain predicted", "measured", "off by")
    for heading in (*headings, "planned in limit", "plain in limit"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        table.add_row(
            row.case,
            format_bytes(row.prediction.planned_bytes),
            format_bytes(row.prediction.planned_process_bytes),
            _size(row.planned),
            _percent(row.planned_error),
            format_bytes(row.prediction.unplanned_process_bytes),
            _size(row.unplanned),
            _percent(row.unplanned_error),
            "fails" if row.planned_in_limit.rise_bytes is None else "succeeds",
            "fails" if row.unplanned_in_limit.rise_bytes is None else "succeeds",
        )
    return table


def _size(training: Training) -> str:
    return "failed" if training.rise_bytes is None else format_bytes(training.rise_bytes)


def _percent(error: float | None) -> str:
    return "?" if error is None else f"{error:+.1%}"


def _options() -> argparse.Namespace:
    parser = words_and_results(__doc__, RESULTS)
    parser.add_argument("--fit", action="store_true", help="plan inside the limit, instead of in another process")
    parser.add_argument("--default", action="store_true", help="leave malloc as it comes")
    parser.add_argument("--predict", help=argparse.SUPPRESS)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fit-budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
