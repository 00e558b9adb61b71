"""How long the first step takes with compiled kernels, from empty caches and from full ones, beside torch.compile.

    python -m benchmarks.first_step                      # the nine cases of the frontier
    python -m benchmarks.first_step --cases resnet gpt   # those whose name contains one of the words

Every figure is of a process of its own, from the model as it is built to the end of its first step, imports left out;
the clock of the whole process is beside it. memfit plans for half of the activations with `remember=True`,
torch.compile has its default budget. The second process of each side finds the caches that the first one left.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import memfit
from benchmarks.frontier_case import eager_run
from benchmarks.malloc import MALLOC_SETTINGS
from benchmarks.measuring import Subject
from benchmarks.models import frontier_cases
from memfit.files import write_atomically

RESULTS = Path(__file__).parent / "results" / "first_step.json"
SIDES = ("memfit", "torch.compile")
FRACTION = 0.5
_MARK = "seconds: "
_LIMIT_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstSteps:
    """Of one case, in seconds, by side: from empty caches, and from those that were left."""

    case: str
    cold_s: dict[str, float]
    warm_s: dict[str, float]
    cold_process_s: dict[str, float]
    warm_process_s: dict[str, float]

    @property
    def is_no_slower(self) -> bool:
        return self.cold_s["memfit"] <= self.cold_s["torch.compile"]


def main() -> None:
    options = _options()
    if options.one is not None:
        print(f"{_MARK}{_first_step(*options.one):.3f}")
        return
    words = [word.lower() for word in options.cases]
    names = [str(case) for case in frontier_cases()]
    results = _load()
    for name in [each for each in names if not words or any(word in each.lower() for word in words)]:
        results[name] = _measured(name)
        ordered = [dataclasses.asdict(results[each]) for each in names if each in results]
        write_atomically(RESULTS, json.dumps({"torch": torch.__version__, "cases": ordered}, indent=1) + "\n")
        print(f"{name}: cold {results[name].cold_s}, warm {results[name].warm_s}", flush=True)
    Console(width=None if sys.stdout.isatty() else 120).print(_table(list(results.values())))
    slower = [each.case for each in results.values() if not each.is_no_slower]
    sys.exit(f"slower than torch.compile from empty caches: {', '.join(slower)}" if slower else 0)


def _measured(name: str) -> FirstSteps:
    taken: dict[str, list[tuple[float, float]]] = {}
    for side in SIDES:
        with tempfile.TemporaryDirectory() as folder:
            taken[side] = [_in_own_process(name, side, folder) for _ in ("cold", "warm")]
    cold, warm = ({side: taken[side][place] for side in SIDES} for place in (0, 1))
    return FirstSteps(
        case=name,
        cold_s={side: seconds for side, (seconds, _) in cold.items()},
        warm_s={side: seconds for side, (seconds, _) in warm.items()},
        cold_process_s={side: process for side, (_, process) in cold.items()},
        warm_process_s={side: process for side, (_, process) in warm.items()},
    )


def _in_own_process(name: str, side: str, folder: str) -> tuple[float, float]:
    """Seconds of the first step, and of the process around it."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/kernels", "MEMFIT_CACHE_DIR": f"{folder}/memfit"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_step", "--one", name, side]
    start = time.monotonic()
    done = subprocess.run(
        command,
        env=os.environ | MALLOC_SETTINGS | caches,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_LIMIT_S,
    )
    seconds = next(line for line in done.stdout.splitlines() if line.startswith(_MARK))
    return float(seconds.removeprefix(_MARK)), round(time.monotonic() - start, 3)


def _first_step(name: str, side: str) -> float:
    case = next(each for each in frontier_cases() if str(each) == name)
    subject = Subject.of(case)
    budget = eager_run(subject, with_time=False).budget_bytes(FRACTION)  # both sides have run eager steps
    options: dict[str, Any] = {} if case.outputs is None else {"outputs": case.outputs}
    start = time.monotonic()
    if side == "memfit":
        sample = case.sample(subject.batch)
        memfit.fit(subject.model, sample, budget, kernels="inductor", remember=True, **options)
        subject.step(subject.model)
    else:
        subject.step(cast(nn.Module, torch.compile(subject.model)))
    return time.monotonic() - start


def _load() -> dict[str, FirstSteps]:
    if not RESULTS.exists():
        return {}
    saved = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {each["case"]: FirstSteps(**each) for each in saved["cases"]} if saved["torch"] == torch.__version__ else {}


def _table(rows: list[FirstSteps]) -> Table:
    table = Table(title="Seconds to the end of the first step (of the whole process)", title_justify="left")
    for heading in ("case", *(f"{side}, {caches}" for caches in ("empty caches", "full caches") for side in SIDES)):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        cells = [
            f"{seconds[side]:.1f} ({whole[side]:.1f})"
            for seconds, whole in ((row.cold_s, row.cold_process_s), (row.warm_s, row.warm_process_s))
            for side in SIDES
        ]
        table.add_row(row.case, *cells)
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[], help="only the cases whose name contains one of these")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "SIDE"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
