"""One rank: a planned model inside DDP against the eager one, in every setting; training runs; peaks."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_models import loss_of, make_batch, make_model
from rank_peaks import peaks
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit import distributed

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "images": ("images", {}),
    "views": ("words", {"gradient_as_bucket_view": True}),
    "static views": ("images", {"static_graph": True, "gradient_as_bucket_view": True}),
    "unused": ("unused", {"find_unused_parameters": True}),
    "unused static": ("unused", {"static_graph": True}),
    "small buckets": ("words", {"bucket_cap_mb": 0.002}),
}
FITTED_AFTER = ("images", "views")
STEPS = 3


@functools.cache
def plan_for(kind: str) -> memfit.Plan:
    plan = distributed.plan(make_model(kind), (make_batch(kind, 0)[0],), budget="smallest", time_limit=0.5)
    assert not plan.is_identity
    return plan


def gradients(kind: str, options: dict[str, Any], fitted: str) -> dict[str, torch.Tensor]:
    """Of three steps, the second with two passes of which the first is not synchronized."""
    rank = dist.get_rank()
    model = make_model(kind)
    sample = (make_batch(kind, rank)[0],)
    if fitted == "before":
        memfit.apply(plan_for(kind), model, sample)
    wrapped = DistributedDataParallel(model, **options)
    if fitted == "after":
        memfit.apply(plan_for(kind), wrapped.module, sample)
    found: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        wrapped.zero_grad(set_to_none=True)
        if step == 1 and not options.get("static_graph"):
            with wrapped.no_sync():
                loss_of(wrapped, make_batch(kind, 50 + rank)).backward()
        loss_of(wrapped, make_batch(kind, 10 * step + rank)).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{step}.{name}"] = parameter.grad.clone()
    return found | {f"buffer.{name}": each.clone() for name, each in model.named_buffers()}


def stepped(**options: Any) -> dict[str, torch.Tensor]:
    """Twenty steps of `memfit.Step` over a planned DDP model; the mean is over tokens, unequally many on the ranks."""
    rank, count = dist.get_rank(), dist.get_world_size()
    model = make_model("words")
    rows = 4 // options.get("micro_batches", 1)
    distributed.fit(model, (whole_batch(0)[0][:rows],), recompute="blocks.*")
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    step = memfit.Step(wrapped, torch.optim.AdamW(model.parameters(), lr=1e-2), mean_over_tokens, **options)
    for number in range(20):
        words, labels = whole_batch(number)
        step((words.chunk(count)[rank], labels.chunk(count)[rank]))
    step.flush()
    return dict(model.state_dict())


def whole_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    words, labels = make_batch("words", number, rows=8)
    labels = labels.clone()
    for row in range(5):  # the first rank has fewer tokens to learn from
        labels[row, row:] = -100
    return words, labels


def mean_over_tokens(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> memfit.Mean:
    labels = batch[1].flatten()
    total = torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return memfit.Mean(total, (labels != -100).sum())


STEP_OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_norm": 0.1},
    "accumulated": {"accumulate": 3, "micro_batches": 2},  # and a flush of the last two
}


def stops_alike() -> str:
    """What a rank hears whose neighbour's loss is not finite, and that it goes on afterwards."""
    model = make_model("words")
    wrapped = DistributedDataParallel(model)
    step = memfit.Step(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), poisoned, micro_batches=2)
    batch = make_batch("words", 0)
    factor = torch.ones(4, 1)
    if dist.get_rank() == 1:
        factor[0] = float("inf")  # in the first of two pieces
    try:
        step((*batch, factor))
        heard = "nothing"
    except memfit.NonFiniteLoss as error:
        heard = str(error)
    step((*batch, torch.ones(4, 1)))
    return heard


def poisoned(model: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return loss_of(model, batch[:2]) * batch[2].mean()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, torch.Tensor] = {}
    for name, (kind, options) in SETTINGS.items():
        for fitted in ("never", "before", "after") if name in FITTED_AFTER else ("never", "before"):
            found |= {f"{name}/{fitted}/{key}": each for key, each in gradients(kind, options, fitted).items()}
    for name, options in STEP_OPTIONS.items():
        found |= {f"step {name}/{key}": each.clone() for key, each in stepped(**options).items()}
    save_file(found, folder / f"rank{dist.get_rank()}.safetensors")
    (folder / f"rank{dist.get_rank()}.txt").write_text(stops_alike())
    if dist.get_world_size() == 2:
        (folder / f"peaks{dist.get_rank()}.json").write_text(json.dumps(peaks()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
