"""Whether models fit a 24 GB GPU at two batch sizes, held against what one of them did.

    python -m benchmarks.gpu_bounds                # all models of the record that are not in the results yet
    python -m benchmarks.gpu_bounds --count 60     # that many more, spread over the record
    python -m benchmarks.gpu_bounds swin regnet    # those whose name contains one of the words, again
    python -m benchmarks.gpu_bounds --table        # what the results say

The record is timm's own: for each model a batch that an RTX 3090 trained with, and the next one of a ladder, with
which it ran out of memory (autocast to float16, channels last, SGD with momentum, torch 1.12). It is not part of the
repository: it is looked for beside it, or in the folder that MEMFIT_GPU_TRUTH names. Nothing runs on a GPU here, and
models have no weights. What that torch did otherwise than today's is done its way: attention is written out, gradients
are kept between steps, and the optimizer takes one parameter after another.
"""

import argparse
import csv
import dataclasses
import functools
import json
import os
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import memfit
from memfit.cli.torchvision_repair import prepare
from memfit.files import write_atomically
from memfit.measure.optimizer import KnownMemory
from memfit.unplanned import unplanned_step

RESULTS = Path(__file__).parent / "results" / "gpu_bounds.json"
DEVICE = "RTX 3090"
_MIB = 2**20

# What torch could hand out on that card: its total as torch told it, less what was neither reserved nor free when
# processes of torch 1.7 to 1.9 ran out of memory, by their messages: 23.70 GiB total, 22.05 reserved and 45.69 MiB
# free (the tutorial of T5-3B of transformers 4.2), 21.70 and 78.56 MiB (a README on guided diffusion, of 2021). Such
# processes load all kernels at once; those of CUDA 11.7 and later take a third of that.
_TOTAL_MIB = 24_269
_CONTEXT_MIB = (1_644, 1_969)
_PARAMETERS_WITHIN = 0.02  # of the record's count: else today's timm builds another model under the name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """One model at one batch size: what a device needs, and what one did."""

    batch: int
    fitted: bool
    allocated_bytes: int
    reserved_bytes: int  # where there is room
    needed_bytes: int  # the least with which it runs
    most_needed_bytes: int

    @property
    def answer(self) -> str:
        """Say "yes", "no" or "depends" for every context that such a process had."""
        roomy, tight = ((_TOTAL_MIB - context_mib) * _MIB for context_mib in _CONTEXT_MIB)
        if self.most_needed_bytes <= tight:
            return "yes"
        return "no" if self.needed_bytes > roomy else "depends"

    @property
    def is_right(self) -> bool:
        return self.answer == ("yes" if self.fitted else "no")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One model of the record: its bounds, or why there are none."""

    model: str
    pixels: int
    bounds: tuple[Bound, ...] = ()
    error: str = ""


def main() -> None:
    options = _options()
    rows = _load()
    console = Console()
    if not options.table:
        prepare()
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # of timm, about names that have changed
        for record in _chosen(_records(), rows, options):
            with console.status(record["model"]):
                row = _row(record)
            rows |= {row.model: row}
            write_atomically(RESULTS, json.dumps([dataclasses.asdict(each) for each in rows.values()], indent=1))
    console.print(_table([*rows.values()]))
    console.print(_verdict([*rows.values()]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of models")
    parser.add_argument("--count", type=int, help="how many more models")
    parser.add_argument("--table", action="store_true", help="only show what the results say")
    return parser.parse_args()


def _records() -> list[dict[str, str]]:
    beside = Path(__file__).parents[2] / "shared" / "gpu-truth"
    path = Path(os.environ.get("MEMFIT_GPU_TRUTH") or beside) / "timm_fit_bounds_rtx3090.csv"
    if not path.exists():
        raise SystemExit(f"there are no records of GPUs at {path}: put them there, or name them in MEMFIT_GPU_TRUTH")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _chosen(records: list[dict[str, str]], rows: dict[str, Row], options: argparse.Namespace) -> list[dict[str, str]]:
    """Return the models that are to be estimated, spread over the record in an order that is always the same."""
    if options.words:
        return [each for each in records if any(word in each["model"] for word in options.words)]
    left = [each for each in records if each["model"] not in rows]
    random.Random(0).shuffle(left)
    return left[: options.count]


def _row(record: dict[str, str]) -> Row:
    pixels = int(record["img_size"])
    batches = [(record["fits_batch"], True), (record["oom_batch_next_on_ladder"], False)]
    known = [(int(batch), fitted) for batch, fitted in batches if batch.isdigit()]
    try:
        with memfit.without_weights():
            model = _model(record["model"])
            samples = [_sample(batch, pixels) for batch, _ in known]
        _check_model(model, record)
        bounds = tuple(_bounds(model, samples, known))
    except Exception as error:
        return Row(model=record["model"], pixels=pixels, error=f"{type(error).__name__}: {error}"[:300])
    return Row(model=record["model"], pixels=pixels, bounds=bounds)


def _check_model(model: nn.Module, record: dict[str, str]) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    recorded = float(record["param_count_M"]) * 1e6
    if abs(count - recorded) > _PARAMETERS_WITHIN * recorded:
        raise ValueError(f"today's timm builds a model of {count:,} parameters, the record's had {recorded:,.0f}")


def _sample(batch: int, pixels: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.empty(batch, 3, pixels, pixels).contiguous(memory_format=torch.channels_last)
    return images, torch.empty(batch, dtype=torch.int64)


def _bounds(
    model: nn.Module, samples: Sequence[tuple[torch.Tensor, torch.Tensor]], known: Sequence[tuple[int, bool]]
) -> Iterator[Bound]:
    """Estimate a model at each batch size; its optimizer, which knows of no batch, is stepped once."""
    optimizer: Any = functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9, nesterov=True, foreach=False)
    for sample, (batch, fitted) in zip(samples, known, strict=True):
        step = unplanned_step(
            model,
            sample,
            loss=_classified,
            optimizer=optimizer,
            device=DEVICE,
            measure=None,
            backward_from="auto",
            progress=None,
            loop=memfit.Loop(gradients="kept"),
        )
        optimizer = KnownMemory(name="SGD", memory=step.optimizer_memory)
        estimate = step.estimate()
        assert estimate.reserved is not None
        yield Bound(
            batch=batch,
            fitted=fitted,
            allocated_bytes=estimate.reserved.allocated_bytes,
            reserved_bytes=estimate.reserved.reserved_bytes,
            needed_bytes=estimate.needed_bytes,
            most_needed_bytes=estimate.most_needed_bytes,
        )


def _model(name: str) -> nn.Module:
    import timm
    from timm.layers import set_fused_attn

    set_fused_attn(False)
    model: nn.Module = timm.create_model(name).train()
    for part in model.modules():
        for place, parameter in part._parameters.items():
            if parameter is not None and parameter.dim() == 4:
                laid = parameter.detach().contiguous(memory_format=torch.channels_last)
                part._parameters[place] = nn.Parameter(laid, parameter.requires_grad)
    return model


def _classified(model: Any, batch: Any) -> torch.Tensor:
    images, labels = batch
    with torch.autocast("cpu", torch.float16):
        outputs = model(images)
        return F.cross_entropy(outputs[0] if isinstance(outputs, tuple) else outputs, labels)


def _load() -> dict[str, Row]:
    if not RESULTS.exists():
        return {}
    saved = json.loads(RESULTS.read_text())
    return {
        each["model"]: Row(**each | {"bounds": tuple(Bound(**bound) for bound in each["bounds"])}) for each in saved
    }


def _table(rows: list[Row]) -> Table:
    table = Table(title="Estimated wrongly, or not at all", title_justify="left")
    for title in ("model", "pixels", "batch", "on the GPU", "estimate", "needed, MiB"):
        table.add_column(title, justify="left" if title == "model" else "right")
    for row in rows:
        if row.error:
            table.add_row(row.model, str(row.pixels), "", "", row.error, "")
        for bound in row.bounds:
            if bound.answer != "depends" and not bound.is_right:
                did = "fitted" if bound.fitted else "did not"
                needed = f"{bound.needed_bytes / _MIB:,.0f} to {bound.most_needed_bytes / _MIB:,.0f}"
                table.add_row(row.model, str(row.pixels), str(bound.batch), did, bound.answer, needed)
    return table


def _verdict(rows: list[Row]) -> str:
    bounds = [bound for row in rows for bound in row.bounds]
    said = Counter(bound.answer for bound in bounds)
    firm = [row for row in rows if row.bounds and all(bound.answer != "depends" for bound in row.bounds)]
    right = [bound for bound in bounds if bound.is_right]
    clear = said["yes"] + said["no"]
    models_right = sum(all(bound.is_right for bound in row.bounds) for row in firm)
    return (
        f"{sum(bool(row.bounds) for row in rows)} models, {len(bounds)} bounds: {len(right)} of {clear} answers right "
        f"({len(right) / max(1, clear):.1%}), {said['depends']} inside the range; both bounds right for {models_right} "
        f"of {len(firm)} models with two clear answers"
    )


if __name__ == "__main__":
    main()
