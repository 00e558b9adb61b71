"""Kill planning processes at random moments and say what the next runs made of it; goes on where it stood.

python -m killed 200          # in the folder tests
python -m killed --trial 17   # one
"""

import argparse
import dataclasses
import json
import tempfile
from collections import Counter
from pathlib import Path

import torch

from killed.trial import Trial, Trials
from memfit.files import write_atomically

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "killed.json"


def main() -> None:
    torch.set_num_threads(1)
    options = _options()
    with tempfile.TemporaryDirectory(prefix="memfit-killed-") as folder:
        trials = Trials(Path(folder))
        if options.trial is not None:
            print(trials.run(options.trial))
            return
        done = _done(options.results)
        for number in range(options.count):
            if number in done:
                continue
            done[number] = trial = trials.run(number)
            if trial.problem:
                print(f"{number}: {trial.workload} after {trial.moments}: {trial.problem}", flush=True)
            with _lines(options.results).open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps(dataclasses.asdict(trial)))
    summary = _summary([done[number] for number in range(options.count)])
    write_atomically(options.results, json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


def _lines(results: Path) -> Path:
    return results.with_name(f".{results.stem}-{torch.__version__}.jsonl")


def _done(results: Path) -> dict[int, Trial]:
    """Trials of before; a line that was cut off by a kill is run again."""
    path, found = _lines(results), {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            trial = Trial(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[trial.number] = trial
    return found


def _summary(trials: list[Trial]) -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "trials": len(trials),
        "moments": sum(len(each.moments) for each in trials),
        "killed while they ran": sum(each.killed for each in trials),
        "by workload": dict(Counter(each.workload for each in trials)),
        "problems": [dataclasses.asdict(each) for each in trials if each.problem],
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=200, help="how many trials (%(default)s)")
    parser.add_argument("--trial", type=int, help="this one alone")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the summary goes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
