"""memfit with compiled kernels and torch.compile in one process, taking turns: who is faster at the same peak.

    python -m benchmarks.duel                 # the nine cases, at budgets 1.0, 0.5 and 0.2 of torch.compile
    python -m benchmarks.duel gpt resnet      # those whose name contains one of the words
    python -m benchmarks.duel --budgets 1.0   # of torch.compile
    python -m benchmarks.duel --all-budgets   # 1.0, 0.9 ... 0.1
    python -m benchmarks.duel --markdown      # prints what is known, runs nothing

The race (`benchmarks.race`) has a process for each side, and ratios to the eager steps of that process. Where big
blocks happen to lie makes eager steps of some models slower in one process than in another, which such ratios do not
cancel. Here everybody has the same process: torch.compile is given one of its budgets, memfit the bytes that
torch.compile then takes, and they and eager run one step each in turn. Where torch.compile makes the same graphs for
two budgets, they are measured once. The exit code is 1 if memfit is slower by more than 2%.
"""

import argparse
import copy
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import memfit
from benchmarks.arguments import words_and_results
from benchmarks.frontier_case import eager_run
from benchmarks.frontier_record import EagerRun
from benchmarks.malloc import MALLOC_SETTINGS
from benchmarks.measuring import Subject, peak_bytes, ratio, taking_turns
from benchmarks.models import frontier_cases, small_cases
from benchmarks.peers import BUDGETS, QUICK_BUDGETS, compile_budget, graphs_compiled, same_graphs
from memfit.files import write_atomically

RESULTS = Path(__file__).parent / "results" / "duel.json"
NO_SLOWER = 1.02
ROUNDS = 4
_MARK = "row: "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One budget of torch.compile; parts are of the activations, times are ratios of medians over rounds."""

    case: str
    budget: float  # torch.compile's
    compile_part: float
    memfit_part: float
    compile_to_eager: float
    memfit_to_eager: float
    memfit_to_compile: float
    error: float  # standard error of the last
    rounds: int
    eager_kernels: bool  # memfit's own choice
    same_as: float | None = None  # a budget with the same graphs, where all of this was measured

    @property
    def is_no_slower(self) -> bool:
        return self.memfit_to_compile <= NO_SLOWER


def main() -> None:
    options = _options()
    if options.one:
        for row in duel(options.one, options.budgets, options.seconds, small=options.small):
            print(_MARK + json.dumps(dataclasses.asdict(row)), flush=True)
        return
    words = [word.lower() for word in options.words]
    names = [str(case) for case in (small_cases() if options.small else frontier_cases())]
    rows = _load(options.results)
    if options.markdown:
        print(markdown(list(rows.values())))
        return
    for name in [each for each in names if not words or any(word in each.lower() for word in words)]:
        for row in _in_own_process(name, options):
            rows = with_row(rows, row)
            print(f"{name} at {row.budget}: {row.memfit_to_compile:.3f} ± {row.error:.3f} of its time", flush=True)
            ordered = [rows[key] for key in sorted(rows, key=lambda key: (names.index(key[0]), -key[1]))]
            _save(options.results, ordered)
    Console(width=None if sys.stdout.isatty() else 140).print(_table(list(rows.values())))
    slower = [f"{row.case} at {row.budget}" for row in rows.values() if row.same_as is None and not row.is_no_slower]
    sys.exit(f"slower than torch.compile: {', '.join(slower)}" if slower else 0)


def with_row(rows: dict[tuple[str, float], Row], row: Row) -> dict[tuple[str, float], Row]:
    """Rows with another one, by case and budget; those with the same graphs say what it says."""
    same = {
        key: dataclasses.replace(row, budget=each.budget, same_as=row.budget)
        for key, each in rows.items()
        if each.case == row.case and each.same_as == row.budget
    }
    return rows | same | {(row.case, row.budget): row}


def duel(name: str, budgets: list[float], seconds: float, *, small: bool = False) -> Iterator[Row]:
    """The rows of one case, one after the other as they are measured."""
    case = next(each for each in (small_cases() if small else frontier_cases()) if str(each) == name)
    subject = Subject.of(case)
    eager = eager_run(subject, with_time=False)
    known: dict[frozenset[str], float] = {}  # budgets by what was compiled for them
    rows: dict[float, Row] = {}
    for budget in budgets:
        torch.compiler.reset()
        compiled, graphs = _compiled(subject, budget)
        before = same_graphs(budget, graphs, known)
        if before is None:
            rows[budget] = _row(subject, eager, compiled, budget, seconds)
        else:
            rows[budget] = dataclasses.replace(rows[before], budget=budget, same_as=before)
        yield rows[budget]


def _row(subject: Subject, eager: EagerRun, compiled: nn.Module, budget: float, seconds: float) -> Row:
    compile_bytes = peak_bytes(subject, compiled)
    planned = _planned(subject, compile_bytes)
    plan = memfit.plan_of(planned)
    assert plan is not None
    models = [subject.model, compiled, planned]
    eager_s, compile_s, memfit_s = taking_turns(subject, models, rounds=ROUNDS, seconds=seconds)
    between, error = ratio(memfit_s, compile_s)
    return Row(
        case=str(subject.case),
        budget=budget,
        compile_part=eager.fraction(compile_bytes),
        memfit_part=eager.fraction(peak_bytes(subject, planned)),
        compile_to_eager=ratio(compile_s, eager_s)[0],
        memfit_to_eager=ratio(memfit_s, eager_s)[0],
        memfit_to_compile=between,
        error=error,
        rounds=len(eager_s),
        eager_kernels="inductor" not in plan.allow,
    )


def _planned(subject: Subject, budget_bytes: int) -> nn.Module:
    options: dict[str, Any] = {} if subject.case.outputs is None else {"outputs": subject.case.outputs}
    planned = copy.deepcopy(subject.model)
    memfit.fit(planned, subject.case.sample(subject.batch), budget_bytes, kernels="inductor", **options)
    return planned


def _compiled(subject: Subject, budget: float) -> tuple[nn.Module, set[str]]:
    """By torch.compile, its first step run; with the hashes of its graphs."""
    compiled = cast(nn.Module, torch.compile(copy.deepcopy(subject.model)))
    with compile_budget(budget), graphs_compiled() as graphs:
        subject.step(compiled)
    return compiled, graphs


def _in_own_process(name: str, options: argparse.Namespace) -> Iterator[Row]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.duel",
        "--one",
        name,
        "--seconds",
        str(options.seconds),
    ]
    command += ["--budgets", *map(str, options.budgets), *["--small"] * options.small]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/kernels", "MEMFIT_CACHE_DIR": f"{folder}/memfit"}
        environment = os.environ | MALLOC_SETTINGS | caches
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
            for line in run.stdout or ():
                if line.startswith(_MARK):
                    yield Row(**json.loads(line.removeprefix(_MARK)))
    if run.returncode:
        print(f"{name} ended with code {run.returncode}", file=sys.stderr)


def _load(path: Path) -> dict[tuple[str, float], Row]:
    """What is known, if it is of this version of torch and this kind of machine."""
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if any(saved.get(name) != value for name, value in _setting().items()):
        return {}
    return {(each["case"], each["budget"]): Row(**each) for each in saved["rows"]}


def _setting() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "malloc": MALLOC_SETTINGS,
    }


def _save(path: Path, rows: list[Row]) -> None:
    content = {**_setting(), "rows": [dataclasses.asdict(row) for row in rows]}
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def _table(rows: list[Row]) -> Table:
    table = Table(title="One step each in turn: parts of the activations, ratios of time", title_justify="left")
    headings = (
        "case",
        "budget",
        "part: torch.compile",
        "memfit",
        "to eager: torch.compile",
        "memfit",
        "to torch.compile",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        table.add_row(
            row.case,
            f"{row.budget:.1f}" + ("" if row.same_as is None else f" (as {row.same_as:.1f})"),
            f"{row.compile_part:.2f}",
            f"{row.memfit_part:.2f}",
            f"{row.compile_to_eager:.3f}",
            f"{row.memfit_to_eager:.3f}" + (" (eager kernels)" if row.eager_kernels else ""),
            f"{row.memfit_to_compile:.3f} ± {row.error:.3f}",
        )
    return table


def markdown(rows: list[Row]) -> str:
    """A table of what was measured, with the budgets that have the same graphs in one row."""
    lines = [
        "| case | `activation_memory_budget` | part left: torch.compile, memfit | time to eager: torch.compile, memfit "
        "| memfit to torch.compile |",
        "|---|---|---|---|---|",
    ]
    for row in [each for each in rows if each.same_as is None]:
        same = [each.budget for each in rows if each.case == row.case and each.same_as == row.budget]
        budgets = ", ".join(map(str, [row.budget, *same]))
        kernels = ", eager kernels" if row.eager_kernels else ""
        lines.append(
            f"| {row.case} | {budgets} | {row.compile_part:.2f}, {row.memfit_part:.2f} "
            f"| {row.compile_to_eager:.2f}, {row.memfit_to_eager:.2f}{kernels} "
            f"| {row.memfit_to_compile:.3f} ± {row.error:.3f} |"
        )
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = words_and_results(__doc__, RESULTS)
    parser.add_argument("--budgets", nargs="+", type=float, default=list(QUICK_BUDGETS), help="of torch.compile")
    parser.add_argument("--all-budgets", dest="budgets", action="store_const", const=list(BUDGETS), help="1.0 to 0.1")
    parser.add_argument("--seconds", type=float, default=30.0, help="of rounds a row (%(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs")
    parser.add_argument("--small", action="store_true", help="small models, to try out the benchmark itself")
    parser.add_argument("--one", metavar="CASE", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
