"""How long planning takes for models of growing depth, and for one of seven billion parameters, without weights.

    python -m benchmarks.plan_time              # GPT-2 with 12, 24, 48 and 96 layers, Llama-2-7B
    python -m benchmarks.plan_time --cases gpt  # those whose name contains one of the words

Every case is planned at persistent + 0.5 x activation part in a process of its own, with times from the roofline of
this machine's kind. The table has processor seconds beside those on the clock: others may use the machine too.
"""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import memfit
from memfit.capture.sample import Sample
from memfit.cli import torchvision_repair
from memfit.files import write_atomically
from memfit.pipeline import StepPlanner
from memfit.prepare import prepare, traced_for
from memfit.recipe import Recipe

RESULTS = Path(__file__).parent / "results" / "plan_time.json"
FRACTION = 0.5
LAYERS = (12, 24, 48, 96)
LARGEST_EXPONENT = 1.3
LONGEST_LLAMA_S = 90.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What planning one model took."""

    case: str
    operations: int
    activations: float  # MiB
    capture_s: float
    prepare_s: float
    solve_s: float
    processor_s: float  # of all three
    slowdown: float
    gap: float

    @property
    def total_s(self) -> float:
        return self.capture_s + self.prepare_s + self.solve_s


def main() -> None:
    options = _options()
    if options.one is not None:
        print(json.dumps(dataclasses.asdict(_timed(options.one))))
        return
    cases = [name for name in _CASES if not options.cases or any(word in name.lower() for word in options.cases)]
    console = Console(width=None if sys.stdout.isatty() else 140)
    timings = []
    for name in cases:
        with console.status(name):
            timings.append(_in_own_process(name))
        console.print(f"{name}: {timings[-1].total_s:.1f} s")
    console.print(_table(timings))
    exponent = _exponent(timings)
    if exponent is not None:
        console.print(f"GPT-2: processor time grows with the number of layers to the power of {exponent:.2f}")
    write_atomically(RESULTS, json.dumps([dataclasses.asdict(each) for each in timings], indent=1) + "\n")
    llama = [each for each in timings if "Llama" in each.case]
    too_slow = any(each.total_s > LONGEST_LLAMA_S for each in llama)
    sys.exit(1 if too_slow or (exponent or 0.0) > LARGEST_EXPONENT else 0)


def _timed(name: str) -> Timing:
    torchvision_repair.prepare()
    processor = time.process_time()
    with memfit.without_weights():
        model, sample = _CASES[name]()
        example = Sample.of(sample)
        recipe = Recipe(budget=1.0, outputs="loss")
        started = time.monotonic()
        with traced_for(model, example, recipe) as joint:
            captured = time.monotonic()
            prepared = prepare(model, joint, example, recipe)
            planning = StepPlanner(model, joint, example, recipe, prepared)
            ready = time.monotonic()
            part_bytes = prepared.unplanned_peak_bytes - prepared.persistent_bytes
            budget = prepared.persistent_bytes + int(FRACTION * part_bytes)
            plan = planning.plan(dataclasses.replace(recipe, budget=budget))
            done = time.monotonic()
    return Timing(
        case=name,
        operations=len(prepared.graph.operations),
        activations=part_bytes / 2**20,
        capture_s=captured - started,
        prepare_s=ready - captured,
        solve_s=done - ready,
        processor_s=time.process_time() - processor,
        slowdown=plan.slowdown,
        gap=plan.gap,
    )


def _gpt2(layers: int) -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, use_cache=False, loss_type="ForCausalLM")
    return GPT2LMHeadModel._from_config(config).train(), _words(4, 128, config.vocab_size)


def _llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(use_cache=False)  # the defaults are those of the model with seven billion parameters
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train(), _words(4, 2048, config.vocab_size)


def _words(sequences: int, tokens: int, vocabulary: int) -> dict[str, torch.Tensor]:
    words = torch.randint(vocabulary, (sequences, tokens))
    return {"input_ids": words, "labels": words.clone()}


_CASES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    **{f"GPT-2, {layers} layers": lambda layers=layers: _gpt2(layers) for layers in LAYERS},  # type: ignore[misc]
    "Llama-2-7B": _llama,
}


def _in_own_process(name: str) -> Timing:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.plan_time", "--one", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Timing(**json.loads(done.stdout.splitlines()[-1]))


def _exponent(timings: list[Timing]) -> float | None:
    """How fast time grows with depth, from the fewest to the most layers."""
    depths = [(layers, each) for layers in LAYERS for each in timings if each.case == f"GPT-2, {layers} layers"]
    if len(depths) < 2:
        return None
    (few, first), (many, last) = depths[0], depths[-1]
    return math.log(last.processor_s / first.processor_s) / math.log(many / few)


def _table(timings: list[Timing]) -> Table:
    table = Table(
        "case", "operations", "activations MiB", "capture s", "measure s", "solve s", "total s", "processor s"
    )
    table.add_column("slowdown")
    table.add_column("gap")
    for each in timings:
        seconds = (each.capture_s, each.prepare_s, each.solve_s, each.total_s, each.processor_s)
        table.add_row(
            each.case,
            str(each.operations),
            f"{each.activations:.0f}",
            *(f"{one:.1f}" for one in seconds),
            f"{each.slowdown:+.1%}",
            f"{each.gap:.1%}",
        )
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[], help="only cases whose name contains one of the words")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
