"""Run generated models and say what became of them; goes on where it stood.

python -m generated 1000 --first 0          # in the folder tests
python -m generated --seed 17 --shrink      # one, made as small as it still fails, as a script of its own
"""

import argparse
from pathlib import Path

import torch

from generated.children import outcomes_of
from generated.draw import draw
from generated.oracle import SOUND, outcome_of
from generated.record import Record
from generated.shrink import script_of, shrink

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "generated.json"


def main() -> None:
    options = _options()
    if options.seed is not None:
        _one(options.seed, options.kernels, shrinks=options.shrink)
        return
    record = Record(options.results, options.kernels)
    seeds = [seed for seed in range(options.first, options.first + options.count) if seed not in record]
    for outcome in outcomes_of(seeds, options.kernels, options.jobs):
        record.add(outcome)
        if outcome.kind not in SOUND:
            print(f"{outcome.seed}: {outcome.kind}: {outcome.reason[:300]}", flush=True)
    record.save()
    print(record.summary())


def _one(seed: int, kernels: str, *, shrinks: bool) -> None:
    torch.set_num_threads(1)  # tiny steps are faster on one
    spec = draw(seed, kernels)
    outcome = outcome_of(spec)
    print(outcome)
    if shrinks and outcome.kind not in SOUND:
        spec = shrink(spec, outcome)
    print(script_of(spec) if shrinks else spec)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=1000, help="how many seeds (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--shrink", action="store_true", help="print the smallest that fails in the same way")
    parser.add_argument("--kernels", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the summary goes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
