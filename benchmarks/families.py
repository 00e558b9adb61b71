"""A matrix of real architectures: captured, equal to eager, fitted to half of their activations.

python -m benchmarks.families              # all, each in a process of its own; goes on where it stood
python -m benchmarks.families GPT-2 BERT   # these, again
python -m benchmarks.families --jobs 2     # two beside each other: faster, and times are worth less
python -m benchmarks.families --table      # docs/families.md from what there is
"""

import argparse
import concurrent.futures
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.family_case import CRASHED, REFUSED, REGIONS, WHOLE, FamilyResult
from benchmarks.family_models import families
from memfit.files import write_atomically
from memfit.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "families.json"
TABLE = Path(__file__).parents[1] / "docs" / "families.md"
_TIME_LIMIT_S = 300
_TOLERANCE = 1e-3  # of numbers that round differently; what is further off is wrong, and no rounding


def run(name: str, library: str) -> FamilyResult:
    """One family in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.family_case", name]
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return FamilyResult(
            name=name,
            library=library,
            captured=CRASHED,
            reason=f"not done after {_TIME_LIMIT_S} s",
            seconds=_TIME_LIMIT_S,
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = next(iter(done.stderr.strip().splitlines()[-1:]), "")
        reason = f"exit code {done.returncode}: {last}"
        seconds = round(time.monotonic() - start, 1)
        return FamilyResult(name=name, library=library, captured=CRASHED, reason=reason, seconds=seconds)
    return FamilyResult(**json.loads(lines[-1]))


def load() -> dict[str, FamilyResult]:
    """Results so far, of this version of torch."""
    if not RESULTS.exists():
        return {}
    saved = json.loads(RESULTS.read_text(encoding="utf-8"))
    if saved["torch"] != torch.__version__:
        return {}
    return {each["name"]: FamilyResult(**each) for each in saved["families"]}


def save(results: dict[str, FamilyResult]) -> None:
    """In the order of the matrix."""
    order = [each.name for each in families() if each.name in results]
    rows = [dataclasses.asdict(results[name]) for name in order]
    write_atomically(RESULTS, json.dumps({"torch": torch.__version__, "families": rows}, indent=1) + "\n")


def is_sound(result: FamilyResult) -> bool:
    """Captured, and equal bit for bit or within the tolerance."""
    captured = result.captured in (WHOLE, REGIONS)
    within = result.beyond_rounding is not None and result.beyond_rounding <= _TOLERANCE
    return captured and (bool(result.exact) or within)


def table(results: dict[str, FamilyResult]) -> str:
    """docs/families.md."""
    rows = [results[each.name] for each in families() if each.name in results]
    whole, regions, refused, crashed = (
        [row for row in rows if row.captured == kind] for kind in (WHOLE, REGIONS, REFUSED, CRASHED)
    )
    silent = [row for row in rows if row.captured in (WHOLE, REGIONS) and not is_sound(row)]
    exact = [row for row in rows if row.exact]
    within = [row for row in rows if row.peak_bytes and row.budget_bytes and row.peak_bytes <= row.budget_bytes * 1.01]
    halved = [row for row in within if row.half_bytes and row.budget_bytes and row.budget_bytes <= row.half_bytes]
    lines = [
        "# Model families",
        "",
        "Written by `make families` (`benchmarks/families.py`): real architectures at tiny configurations, with random",
        "weights, on one thread of a CPU. Each is captured, planned for half of its activation part (or, where there",
        "is no such plan, for the smallest there is), compared with the eager step (loss or outputs, gradients,",
        "buffers, generators), and measured. Steps take milliseconds here, so the time is what it costs at its worst.",
        "A difference is relative to the largest number of its tensor; one below what a single float rounds of the",
        "largest gradient is called rounding (the gradient of a key's bias is zero but for that).",
        "",
        f"{len(rows)} families: {len(whole)} captured whole, {len(regions)} by regions, {len(refused)} refused, "
        f"{len(crashed)} crashed. {len(exact)} equal bit for bit; different beyond {_TOLERANCE:g}: {len(silent)}.",
        f"{len(within)} within the budget (1%), {len(halved)} of them at half of the activation part.",
        "",
        "| family | from | captured | equal to eager | eager peak | budget | measured peak | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(row) for row in rows]
    notes = [row for row in rows if row.reason]
    if notes:
        lines += ["", "## Why not whole", ""]
        lines += [f"- **{row.name}** ({row.captured}): {_sentence(row.reason)}" for row in notes]
    return "\n".join(lines) + "\n"


def _row(row: FamilyResult) -> str:
    if row.peak_bytes is None or row.budget_bytes is None or row.eager_peak_bytes is None or row.half_bytes is None:
        return f"| {row.name} | {row.library} | {row.captured} | | | | | |"
    equal = "bit for bit" if row.exact else _difference(row)
    smallest = "" if row.budget_bytes <= row.half_bytes else " (smallest)"
    time_ratio = "" if row.slowdown is None else f"{row.slowdown:+.0%}"
    return (
        f"| {row.name} | {row.library} | {row.captured} | {equal} | {format_bytes(row.eager_peak_bytes)} | "
        f"{format_bytes(row.budget_bytes)}{smallest} | {format_bytes(row.peak_bytes)} | {time_ratio} |"
    )


def _difference(row: FamilyResult) -> str:
    if row.beyond_rounding == 0:
        return "rounding"
    return f"up to {row.difference if row.beyond_rounding is None else row.beyond_rounding:.1e}"


def _sentence(reason: str) -> str:
    return " ".join(reason.split())[:400]


def main() -> None:
    options = _options()
    results = load()
    wanted = [
        family
        for family in ([] if options.table else families())
        if family.name in options.names or (not options.names and family.name not in results)
    ]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(run, family.name, family.library) for family in wanted]
        try:
            for done in concurrent.futures.as_completed(running):
                found = done.result()
                results[found.name] = found
                save(results)
                print(f"{found.name}: {found.captured}, exact {found.exact}, {found.seconds} s {found.reason[:150]}")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            sys.exit("interrupted; the same command goes on where this stood")
    write_atomically(TABLE, table(results))
    unsound = [name for name, result in results.items() if not is_sound(result)]
    print(f"{len(results) - len(unsound)} of {len(results)} sound; not: {', '.join(unsound) or 'none'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these, again")
    parser.add_argument(
        "--jobs", type=int, default=1, help="families beside each other, on a thread each (%(default)s)"
    )
    parser.add_argument("--table", action="store_true", help="only write docs/families.md from what there is")
    return parser.parse_args()


if __name__ == "__main__":
    main()
