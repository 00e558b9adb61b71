"""What one rank of a sharded run meets alone: a bad loss, a full disk, a damaged file. None may be left waiting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from sharded_models import BATCH, Blocks, rank_part, sharded
from torch import nn

import memfit
from memfit import collectives
from memfit.distributed import checkpoint, fit_sharded, load_sharded, save_sharded
from memfit.tensors import same_bits


def make_sharded(kind: type[Blocks] = Blocks) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    return sharded(model, list(model.blocks))


def parts_of(model: nn.Module) -> list[torch.Tensor]:
    return [each.to_local().detach().clone() for each in model.parameters()]  # type: ignore[operator]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(same_bits(*each) for each in zip(one, other, strict=True))


def heard(act: Callable[[], Any]) -> str:
    try:
        act()
    except (memfit.MemfitError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def stops_alike() -> dict[str, Any]:
    """The loss is not finite on the last rank, in the first of two pieces."""
    model = make_sharded()
    step = memfit.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), poisoned, micro_batches=2)
    batch, factor = rank_part(torch.randn(BATCH, 16, 32)), torch.ones(BATCH // dist.get_world_size(), 1)
    before, bad = parts_of(model), factor.clone()
    if dist.get_rank() == dist.get_world_size() - 1:
        bad[0] = float("inf")
    found: dict[str, Any] = {"heard": heard(lambda: step((batch, bad)))}
    found["unchanged"] = equal(before, parts_of(model))
    found["without gradients"] = all(each.grad is None for each in model.parameters())
    step((batch, factor))
    found["moved on"] = not equal(before, parts_of(model))
    return found


def poisoned(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(batch[0]) * batch[1].mean()


def fails_alike(folder: Path) -> dict[str, str]:
    """The last rank cannot write its file, the first not the index; then the last cannot read the index."""
    model = make_sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = memfit.Step(model, optimizer, lambda model, batch: model(batch))
    step(rank_part(torch.randn(BATCH, 16, 32)))
    save_sharded(folder, model, optimizer, step=step, extra={"saved": 1})
    full = OSError(28, "No space left on device")
    fails_here = dist.get_rank() == dist.get_world_size() - 1
    found = {}
    with mock.patch.object(checkpoint, "write_tensors", side_effect=full if fails_here else None):
        found["writing"] = heard(lambda: save_sharded(folder, model, optimizer, step=step, extra={"saved": 2}))
    with mock.patch.object(checkpoint, "_replace", side_effect=full):
        found["index"] = heard(lambda: save_sharded(folder, model, optimizer, step=step, extra={"saved": 3}))
    found["first is there"] = str(load_sharded(folder, model, optimizer, step=step))
    damaged = memfit.InvalidFile("damaged here")
    real = checkpoint._read_index
    with mock.patch.object(checkpoint, "_read_index", side_effect=damaged if fails_here else real):
        found["reading"] = heard(lambda: load_sharded(folder, model, optimizer, step=step))
    return found


class Dropping(Blocks):
    """Draws numbers, other ones on every rank."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(values, 0.2, training=self.training))


def goes_on(folder: Path) -> dict[str, Any]:
    """With dropout, a schedule, clipping and micro-batches: stopped after 3 of 5 steps, and started anew."""
    whole = run_of(folder, 5)
    run_of(folder, 3, saves=True)
    return {"bits": equal(whole, run_of(folder, 5, loads=True))}


def run_of(folder: Path, steps: int, *, saves: bool = False, loads: bool = False) -> list[torch.Tensor]:
    model = make_sharded(Dropping)
    fit_sharded(model, rank_part(torch.randn(BATCH, 16, 32))[:2], "smallest", time_limit=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    step = memfit.Step(
        model, optimizer, lambda model, batch: model(batch), scheduler=scheduler, clip_norm=0.5, micro_batches=2
    )
    torch.manual_seed(dist.get_rank())
    if loads:
        load_sharded(folder, model, optimizer, step=step)
    for number in range(step.position.batches, steps):
        step(rank_part(torch.randn(BATCH, 16, 32, generator=torch.Generator().manual_seed(number))))
    if saves:
        save_sharded(folder, model, optimizer, step=step)
    return parts_of(model)


def averaged() -> dict[str, Any]:
    """Tensors of several kinds, in messages of a hundred bytes: small ones together, big ones alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = [(3,), (2, 4), (50,), (1,), (7, 5), (2,)]
    tensors: list[torch.Tensor | None] = [torch.full(shape, float(rank)) for shape in shapes]
    tensors += [None, torch.full((4,), rank, dtype=torch.float64), torch.full((6, 8), float(rank)).t()]
    messages: list[int] = []
    real = dist.all_reduce

    def counting(tensor: torch.Tensor, **options: Any) -> Any:
        messages.append(tensor.nbytes)
        return real(tensor, **options)

    with mock.patch.object(collectives, "_MESSAGE_BYTES", 100), mock.patch.object(dist, "all_reduce", counting):
        collectives.average(tensors)
    mean = (size - 1) / 2
    right = all(bool((each == mean).all()) for each in tensors if each is not None)
    return {"right": right, "messages": messages}
