"""Multilevel programs: every hypergradient beside Betty, and what techniques save in the reweighting of ResNet-50.

    python -m benchmarks.multilevel                 # everything, about ten minutes
    python -m benchmarks.multilevel methods         # hypergradients on the residual MLP
    python -m benchmarks.multilevel ablation        # the memory of the reweighting of ResNet-50
    python -m benchmarks.multilevel --results FILE  # also write the figures as JSON

Betty is measured where the package betty-ml is installed beside memfit. A peak is that of a whole cycle (lower steps
and the upper step), parameters and optimizer states included; times are medians of interleaved cycles. Every row
has a process of its own, with glibc told to keep big blocks.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.malloc import MALLOC_SETTINGS
from benchmarks.multilevel_peers import betty_program, has_betty, loop_by_hand, plain_unrolling
from benchmarks.multilevel_programs import UNROLLED, regression_program, reweighting_program
from memfit.files import write_atomically
from memfit.measure.peak import measure_peak
from memfit.multilevel import Config, Engine

_PAIRS = 5
_BATCH = 32

METHODS: dict[str, dict[str, Any]] = {
    "darts": {"type": "darts"},
    "sama": {"type": "sama"},
    "neumann": {"type": "neumann", "neumann_iterations": 3, "neumann_alpha": 0.01},
    "cg": {"type": "cg", "cg_iterations": 3},
    "nystrom": {"type": "nystrom", "nystrom_rank": 5},
    "unrolled": {"type": "unrolled", "unroll_steps": UNROLLED},
    "unrolled, √T": {"type": "unrolled", "unroll_steps": UNROLLED, "unroll_checkpoint": "sqrt"},
}
BETTY_HAS = ("darts", "neumann", "cg")

ABLATION: dict[str, dict[str, Any]] = {
    "baseline": {},
    "+ accumulation of 4": {"gradient_accumulation": 4},
    "+ bf16": {"gradient_accumulation": 4, "precision": "bf16"},
    "+ plan for 0.8 instead": {"gradient_accumulation": 4, "budget": 0.8},
    "+ data parallel instead (each of 2)": {"gradient_accumulation": 2, "distributed": True},
    "plan for 0.6 alone": {"budget": 0.6},
    "fp16 alone": {"precision": "fp16"},  # slow where the CPU has no fp16 of its own
}
_LIMIT_S = 240  # for one row


def main() -> None:
    options = _options()
    if options.one is not None:
        print(json.dumps(_measured(*options.one)))
        return
    console = Console(width=120)
    results: dict[str, Any] = {"torch": torch.__version__, "platform": platform.platform(), "betty": has_betty()}
    if options.part in (None, "methods"):
        results["methods"] = [_row(console, "method", name) for name in METHODS]
        results["loop"] = _row(console, "loop", "by hand")
        console.print(_methods_table(results["methods"]))
        console.print(f"engine against a loop written by hand: {results['loop'].get('ratio')} of its time")
    if options.part in (None, "ablation"):
        results["ablation"] = [_row(console, "ablation", name) for name in ABLATION]
        console.print(_ablation_table(results["ablation"]))
    if options.results is not None:
        write_atomically(options.results, json.dumps(results, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", nargs="?", choices=["methods", "ablation"])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _row(console: Console, kind: str, name: str) -> dict[str, Any]:
    """One row, measured in processes of its own."""
    ranks = 2 if ABLATION.get(name, {}).get("distributed") else 1
    environment = os.environ | MALLOC_SETTINGS
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.multilevel", "--one", kind, name]
    with console.status(f"{kind} {name}"):
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment | {"RANK": str(rank)})
            for rank in range(ranks)
        ]
        try:
            output = [process.communicate(timeout=_LIMIT_S)[0] for process in processes]
        except subprocess.TimeoutExpired:
            for process in processes:
                process.kill()
            return {"name": name, "reason": f"not done after {_LIMIT_S} s"}
    if any(process.returncode for process in processes):
        return {"name": name, "reason": "failed"}
    row: dict[str, Any] = {"name": name, **json.loads(output[0].splitlines()[-1])}
    console.print(json.dumps(row), style="dim", soft_wrap=True)
    return row


def _measured(kind: str, name: str) -> dict[str, Any]:
    if kind == "method":
        return _method(name)
    return _ablation(name) if kind == "ablation" else _loop()


def _method(name: str) -> dict[str, Any]:
    settings = METHODS[name]
    steps = settings.get("unroll_steps", 1)
    engine = regression_program(Config(**settings))
    row: dict[str, Any] = {"peak_bytes": peak_of(engine, steps), "pull_bytes": peak_of_pull(engine)}
    cycle = _cycle(engine, steps)
    if name in BETTY_HAS and has_betty():
        betty = betty_program(**settings)
        betty.train_step()
        held = [held for problem in betty.problems for held in (problem.module, problem.optimizer)]
        row["other"] = "Betty"
        row["other_peak_bytes"] = measure_peak(betty.train_step, resident=held).peak_bytes
        row["other_pull_bytes"] = _peak_of_betty_pull(betty, name)
        row |= _ratio(cycle, betty.train_step)
    elif settings["type"] == "unrolled":
        plain, held = plain_unrolling()
        plain()
        row["other"] = "plain unrolling"
        row["other_peak_bytes"] = measure_peak(plain, resident=held).peak_bytes
        row |= _ratio(cycle, plain)
    else:
        row |= _ratio(cycle, cycle)
    return row


def _loop() -> dict[str, Any]:
    return _ratio(_cycle(regression_program(Config()), 1), loop_by_hand()[0], pairs=40 * _PAIRS)


def _ablation(name: str) -> dict[str, Any]:
    settings = dict(ABLATION[name])
    distributed = settings.pop("distributed", False)
    parts = settings.get("gradient_accumulation", 1) * (2 if distributed else 1)
    upper = {key: value for key, value in settings.items() if key != "budget"}
    engine = reweighting_program(
        Config(**settings), Config(**upper), batch_size=_BATCH // parts, distributed=distributed
    )
    peak_bytes = peak_of(engine, 1)
    seconds = [_seconds(engine.train_step) for _ in range(2)]
    return {"peak_bytes": peak_bytes, "seconds": min(seconds)}


def _cycle(engine: Engine, steps: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(steps):
            engine.train_step()

    return run


def peak_of(engine: Engine, steps: int) -> int:
    """Of a cycle after the first; measured over two, since the profiler does not see the end of older blocks."""
    cycle = _cycle(engine, steps)
    engine.train()
    cycle()
    for problem in engine.problems:
        problem.record, problem.trajectory = None, []
    held = [held for problem in engine.problems for held in (problem.module, problem.optimizer)]
    return measure_peak(lambda: (cycle(), cycle()), resident=held).peak_bytes


def peak_of_pull(engine: Engine) -> int:
    """Of the hypergradient alone, beyond what is there before it."""
    from memfit.multilevel.hypergradient import METHODS as PULLS
    from memfit.multilevel.hypergradient.method import Pull

    weights, regression = engine.problems
    vector = [torch.randn_like(parameter) for parameter in regression.parameter_list]
    pull = Pull(lower=regression, vector=vector, onto=(weights,), upper=weights, loss=torch.zeros(()))
    with torch.no_grad():
        return measure_peak(lambda: PULLS[regression.method].pull(pull), resident=[]).peak_bytes


def _peak_of_betty_pull(engine: Any, name: str) -> int:
    import importlib

    weights, regression = engine.problems
    vector = [torch.randn_like(parameter) for parameter in regression.trainable_parameters()]
    pull = getattr(importlib.import_module(f"betty.hypergradient.{name}"), name)
    return measure_peak(lambda: pull(vector, regression, weights), resident=[]).peak_bytes


def _ratio(ours: Callable[[], Any], other: Callable[[], Any], pairs: int = _PAIRS) -> dict[str, float]:
    """Seconds of our cycle and its ratio to another's: medians over pairs of cycles in both orders."""
    ours(), other()
    times, ratios = [], []
    for number in range(pairs):
        if number % 2:
            theirs, own = _seconds(other), _seconds(ours)
        else:
            own, theirs = _seconds(ours), _seconds(other)
        times.append(own)
        ratios.append(own / theirs)
    return {"seconds": statistics.median(times), "ratio": statistics.median(ratios)}


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _methods_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("method", "peak of a cycle", "of the hypergradient", "other", "its peak", "its hypergradient", "time")
    for row in rows:
        if "reason" in row:
            table.add_row(row["name"], row["reason"])
            continue
        other = row.get("other", "")
        table.add_row(
            row["name"],
            _megabytes(row["peak_bytes"]),
            _megabytes(row["pull_bytes"]),
            other,
            _megabytes(row.get("other_peak_bytes")),
            _megabytes(row.get("other_pull_bytes")),
            f"{row['ratio']:.2f} of its" if other else f"{row['seconds']:.2f} s",
        )
    return table


def _ablation_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("reweighting, ResNet-50, batch of 32", "peak", "of the baseline", "time of a cycle")
    for row in rows:
        if "reason" in row or "reason" in rows[0]:
            table.add_row(row["name"], row.get("reason", ""))
            continue
        share = row["peak_bytes"] / rows[0]["peak_bytes"]
        table.add_row(row["name"], _megabytes(row["peak_bytes"]), f"{share:.2f}", f"{row['seconds']:.2f} s")
    return table


def _megabytes(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
