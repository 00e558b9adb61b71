"""Predicted against measured peak of every rank, on two real processes that talk by gloo.

python -m benchmarks.ranks [--write]    the table, and with --write benchmarks/results/ranks.json
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import rank_cases
from benchmarks.rank_case import STRATEGIES
from memfit.files import write_atomically
from memfit.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "ranks.json"
WORLD_SIZE = 2


def main() -> None:
    rows = []
    table = Table("model", "strategy", "rank", "predicted", "measured", "error")
    for case in rank_cases():
        for strategy in STRATEGIES:
            for found in measured_ranks(case.name, strategy):
                rows.append({"model": str(case), "strategy": strategy, **found})
                error = found["predicted"] / found["measured"] - 1
                sizes = [format_bytes(found[name]) for name in ("predicted", "measured")]
                table.add_row(str(case), strategy, str(found["rank"]), *sizes, f"{error:+.3%}")
    Console().print(table)
    if "--write" in sys.argv:
        content = {"torch": torch.__version__, "backend": "gloo", "world_size": WORLD_SIZE, "rows": rows}
        write_atomically(RESULTS, json.dumps(content, indent=2) + "\n")


def measured_ranks(case: str, strategy: str) -> list[dict[str, Any]]:
    """Run one case in as many processes as there are ranks; what each of them found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = os.environ | {
        "WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.rank_case", case, strategy]
    processes = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        outcomes = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(errors[-2000:] for _, errors in outcomes))
    return [json.loads(output.strip().splitlines()[-1]) for output, _ in outcomes]


if __name__ == "__main__":
    main()
