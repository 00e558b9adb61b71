"""A Llama of 1.1 billion parameters trained by `memfit.Step` in a process of 10 GiB, beside plain steps.

    python -m benchmarks.big_run                       # both runs, or what is missing of them
    python -m benchmarks.big_run --fresh budgeted      # one of them again
    python -m benchmarks.big_run --size small          # another size, to try out the benchmark itself
    python -m benchmarks.big_run --directory SCRATCH   # on a disk: where the optimizer's state goes
    python -m benchmarks.big_run --results FILE        # where the figures go; runs that are complete there are kept

Both runs start from the same weights and see the same batches; their losses, and all parameters at the end, must be
the same bits. The limit is that of the kernel (RLIMIT_DATA: private memory), set when everything is imported. A run
that is interrupted begins anew.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.big_run_case import BUDGETED, MARK, PLAIN, SIZES, Size
from memfit.files import write_atomically
from memfit.units import format_bytes, parse_bytes

RESULTS = Path(__file__).parent / "results" / "big_run.json"
_ROOT = Path(__file__).parent.parent

Run = dict[str, Any]  # what a process found out, its steps under "steps"


def main() -> None:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 140)
    known = _known(options.results)
    own = known.setdefault(options.size, {})
    for kind in (BUDGETED, PLAIN):
        if kind in own and kind not in options.fresh:
            console.print(f"{options.size}, {kind}: known already")
            continue
        if kind == PLAIN:
            _check_room(SIZES[options.size])
        own[kind] = run(options.size, kind, options.directory, console)
        write_atomically(options.results, json.dumps(known, indent=1) + "\n")
    console.print(_table(options.size, own))
    problems = problems_of(own, SIZES[options.size])
    console.print(
        "\n".join(problems) or "the same bits in all losses and parameters, inside the limit", highlight=False
    )
    sys.exit(1 if problems else 0)


def run(size: str, kind: str, directory: Path | None, console: Console) -> Run:
    """Train in a process of its own; every step is shown when it is done."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.big_run_case", size, kind]
        command += [scratch] if kind == BUDGETED else []
        found: Run = {**_setting(), "steps": []}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
            try:
                for line in process.stdout or ():
                    if line.startswith(MARK):
                        _take(found, json.loads(line.removeprefix(MARK)))
                        console.print(f"{size}, {kind}: {_latest(found)}", highlight=False)
            finally:
                process.terminate()  # if this process is interrupted
    if process.returncode:
        raise SystemExit(f"the {kind} run of {size} ended with code {process.returncode}; its errors are above")
    return found


def problems_of(runs: dict[str, Run], size: Size) -> list[str]:
    """Return what was promised and is not so."""
    plain, budgeted = runs[PLAIN], runs[BUDGETED]
    problems = []
    if losses_of(plain) != losses_of(budgeted):
        problems.append(f"losses differ: {losses_of(plain)} plain, {losses_of(budgeted)} under the budget")
    if plain["parameter_digest"] != budgeted["parameter_digest"]:
        problems.append("parameters differ after the last step")
    if peak_bytes(budgeted) > parse_bytes(size.limit):
        problems.append(f"{format_bytes(peak_bytes(budgeted))} of memory were taken, over the limit of {size.limit}")
    return problems


def losses_of(run: Run) -> list[float]:
    return [step["loss"] for step in run["steps"]]


def peak_bytes(run: Run) -> int:
    """The most private memory beyond what the process had after its imports."""
    parts: list[int] = [
        run["build_bytes"],
        run.get("planning_bytes", 0),
        *(step["peak_bytes"] for step in run["steps"]),
    ]
    return max(parts)


def _take(found: Run, told: Run) -> None:
    if "step" in told:
        found["steps"].append(told["step"])
    else:
        found.update(told)


def _latest(found: Run) -> str:
    if "parameter_digest" in found:
        return f"done, at most {format_bytes(found['resident_peak_bytes'])} in RAM"
    if found["steps"]:
        step = found["steps"][-1]
        return f"step {len(found['steps'])}: loss {step['loss']!r}, {step['step_s']:.1f} s"
    if "planning_s" in found:
        return f"planned in {found['planning_s']:.1f} s: {found['choice'][0]}"
    return f"built in {found['build_s']:.1f} s"


def _table(size: str, runs: dict[str, Run]) -> Table:
    table = Table(title=f"Llama, {size}: seconds of every step; reads and writes run beside the rest")
    for heading in ("run", "step", "loss", "s", "passes", "update", "waiting", "reads", "writes", "VmData"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for kind, found in runs.items():
        for number, step in enumerate(found["steps"], start=1):
            pass_s = step["step_s"] - step["update_s"]
            parts = (step["step_s"], pass_s, step["update_s"], step["wait_s"], step["read_s"], step["write_s"])
            table.add_row(
                kind, str(number), f"{step['loss']:.7f}", *(f"{each:.1f}" for each in parts),
                format_bytes(step["peak_bytes"]),
            )  # fmt: skip
    return table


def _check_room(size: Size) -> None:
    """Do not start what the machine cannot hold: it would take others down with it."""
    free_bytes = psutil.virtual_memory().available
    if free_bytes < parse_bytes(size.plain_needs):
        raise SystemExit(
            f"the plain steps need {size.plain_needs} of memory and {format_bytes(free_bytes)} are free; give the same "
            "command again when there is more, and it goes on here"
        )


def _known(path: Path) -> dict[str, dict[str, Run]]:
    known: dict[str, dict[str, Run]] = json.loads(path.read_text()) if path.exists() else {}
    return known


def _setting() -> Run:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} processors",
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.1B")
    parser.add_argument("--fresh", nargs="+", choices=(PLAIN, BUDGETED), default=[])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on with the run that was interrupted")
