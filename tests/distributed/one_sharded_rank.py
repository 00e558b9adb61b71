"""One rank of a run that FSDP2 shards: every case of it, with what was found written down for the tests.

Started by torchrun: `one_sharded_rank.py FOLDER CASE...`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_models import BATCH, STEPS, Blocks, gpt2, rank_part, resnet, sharded, trained, words
from sharded_together import averaged, fails_alike, goes_on, stops_alike
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

import memfit
from memfit.distributed import fit_sharded, load_sharded, plan_sharded, save_sharded
from memfit.measure.peak import MeasuredPeak, measure_peak
from memfit.tensors import same_bits

Found = dict[str, Any]


def backward(model: nn.Module, sample: Any) -> None:
    if isinstance(sample, dict):
        model(**sample).loss.backward()  # nobody holds the logits
    else:
        output = model(sample)
        (output if output.dim() == 0 else output.square().mean()).backward()


def measured(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> MeasuredPeak:
    def run() -> None:
        backward(model, sample)
        optimizer.step()

    peaks = []
    for _ in range(6):  # a release on a thread of the backend may be missed, which only makes it higher
        model.zero_grad()
        peaks.append(measure_peak(run, resident=[model, sample, optimizer]))
    model.zero_grad()
    return min(peaks, key=lambda peak: peak.peak_bytes)


def equal_gradients(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    found = [(mine.grad, theirs.grad) for mine, theirs in pairs]
    assert any(mine is not None for mine, _ in found)
    return all(mine is not None and theirs is not None and same_bits(*_local(mine, theirs)) for mine, theirs in found)


def equal_buffers(one: nn.Module, other: nn.Module) -> bool:
    return all(same_bits(*each) for each in zip(one.buffers(), other.buffers(), strict=True))


def _local(*tensors: Any) -> list[torch.Tensor]:
    return [tensor.to_local() for tensor in tensors]


def compared(
    make: Callable[[], nn.Module], sample: Any, time_limit: float, optimizer: str = "AdamW", *, part: float | None = 0.5
) -> Found:
    """Plan at a part of the activations, or the smallest, and compare with the eager twin and the prediction."""
    eager, planned = make(), make()
    steppers = [getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3) for model in (eager, planned)]
    torch.manual_seed(0)
    backward(eager, sample)
    before = measured_later(eager, sample, steppers[0])
    budget = "smallest"
    if part is not None:
        persistent_bytes = before.live_bytes[-1]
        budget = largest(persistent_bytes + int(part * (before.peak_bytes - persistent_bytes)))
    fit_sharded(planned, sample, budget, optimizer=steppers[1], time_limit=time_limit)
    plan = memfit.plan_of(planned)
    assert plan is not None
    twin = make()
    for model in (twin, planned):
        torch.manual_seed(0)
        backward(model, sample)
    bits = equal_gradients(twin, planned) and equal_buffers(twin, planned)
    after = measured_later(planned, sample, steppers[1])
    return {
        "bits": bits,
        "regions": list(plan.regions),
        "kinds": len({region.program.graph_digest for region in plan.regions.values()}),
        "budget": plan.budget_bytes,
        "persistent": plan.persistent_bytes,
        "eager": before.peak_bytes,
        "predicted_eager": plan.unplanned_peak_bytes,
        "planned": after.peak_bytes,
        "predicted": plan.peak_bytes,
        "slowdown": plan.slowdown,
        "program": [len(region.program.backward) for region in plan.regions.values()],
    }


def measured_later(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> MeasuredPeak:
    """After a first step, which makes the state of the optimizer."""
    optimizer.step()
    return measured(model, sample, optimizer)


def largest(number: int) -> int:
    value = torch.tensor([number])
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)


def case_gpt2(folder: Path, big: bool) -> Found:
    def make() -> nn.Module:
        model = gpt2(big)
        return sharded(model, list(model.transformer.h))

    tokens = rank_part(words(big))
    return compared(make, {"input_ids": tokens, "labels": tokens}, 20.0 if big else 6.0)


def case_resnet(folder: Path, big: bool) -> Found:
    def make() -> nn.Module:
        model = resnet(big)
        stages = (model.layer1, model.layer2, model.layer3, model.layer4)
        return sharded(model, [block for stage in stages for block in stage])

    size = (16, 3, 128, 128) if big else (8, 3, 96, 96)
    images = torch.randn(size, generator=torch.Generator().manual_seed(dist.get_rank()))
    return compared(make, images, 40.0 if big else 5.0, "SGD", part=0.6 if big else 0.7)


def case_stages(folder: Path, big: bool) -> Found:
    """Units of whole stages keep less between them: half of the activation part."""

    def make() -> nn.Module:
        model = resnet(big)
        return sharded(model, [model.layer1, model.layer2, model.layer3, model.layer4])

    images = torch.randn((16, 3, 128, 128), generator=torch.Generator().manual_seed(dist.get_rank()))
    return compared(make, images, 40.0, "SGD", part=0.5)


POLICIES: dict[str, Any] = {
    "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "offload_policy": CPUOffloadPolicy(pin_memory=False),
    "reshard_after_forward": False,
}


def case_policies(folder: Path, big: bool) -> Found:
    batch = rank_part(torch.randn(BATCH, 128, 32, generator=torch.Generator().manual_seed(0)))

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Blocks()
        return sharded(model, list(model.blocks), **POLICIES)

    return compared(make, batch, 0.5, part=None)


def case_grid(folder: Path, big: bool) -> Found:
    """A mesh of two dimensions: shards within a row, the same ones in every row."""
    batch = rank_part(torch.randn(BATCH, 128, 32, generator=torch.Generator().manual_seed(0)))

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Blocks()
        return sharded(model, list(model.blocks), rows=2)

    return compared(make, batch, 0.5, part=None)


def case_training(folder: Path, big: bool) -> Found:
    """Twenty steps, planned and eager; the tests compare with one process and the whole batch."""
    models: list[nn.Module] = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Blocks()
        sharded(model, list(model.blocks))
        if planned:
            sample = rank_part(torch.randn(BATCH, 16, 32))
            fit_sharded(model, sample, "smallest", time_limit=1.0)
        trained(model, STEPS, rank_part)
        models.append(model)
    whole = [[each.full_tensor() for each in model.parameters()] for model in models]  # type: ignore[operator]
    torch.save([each.detach() for each in whole[1]], folder / f"trained{dist.get_rank()}.pt")
    found = {"bits": all(same_bits(*each) for each in zip(*whole, strict=True))}
    found["is sharded"] = isinstance(models[1], FSDPModule)
    memfit.remove(models[1])
    found["removed"] = not any("forward" in module.__dict__ for module in models[1].modules())
    return found


def case_refusals(folder: Path, big: bool) -> Found:
    model = Blocks()
    sharded(model, list(model.blocks))
    batch = rank_part(torch.randn(BATCH, 16, 32))
    found: Found = {}
    try:
        plan_sharded(model, batch, budget=1000, time_limit=0.5)
    except memfit.InfeasibleBudget as error:
        found["infeasible"] = [str(error), error.smallest_bytes]
    try:
        plan_sharded(model, batch[: 4 - dist.get_rank()], budget="smallest", time_limit=0.5)
    except memfit.InvalidModel as error:
        found["other shapes"] = str(error)
    try:
        plan_sharded(Blocks(), batch, budget="smallest")
    except memfit.InvalidModel as error:
        found["not sharded"] = str(error)
    return found


def case_checkpoint(folder: Path, big: bool) -> Found:
    """Go on from what one process saved, and save for one process."""
    torch.manual_seed(1)
    model = Blocks()
    sharded(model, list(model.blocks))
    fit_sharded(model, rank_part(torch.randn(BATCH, 16, 32)), "smallest", time_limit=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    step = memfit.Step(model, optimizer, lambda model, batch: model(batch))
    extra = load_sharded(folder / "from_one", model, optimizer, step=step)
    found = {"extra": extra, "lr": optimizer.param_groups[0]["lr"], "updates": step.position.updates}
    loaded = [each.full_tensor() for each in model.parameters()]  # type: ignore[operator]
    torch.save([each.detach() for each in loaded], folder / f"loaded{dist.get_rank()}.pt")
    trained(model, 3, rank_part, optimizer)
    save_sharded(folder / "from_two", model, optimizer, step=step, extra={"epoch": 7})
    trained(model, 2, rank_part, optimizer)
    end = [each.full_tensor() for each in model.parameters()]  # type: ignore[operator]
    load_sharded(folder / "from_two", model, optimizer, step=step)
    trained(model, 2, rank_part, optimizer)
    again = [each.full_tensor() for each in model.parameters()]  # type: ignore[operator]
    found["resumed"] = all(same_bits(*each) for each in zip(end, again, strict=True))
    torch.save([each.detach() for each in end], folder / f"end{dist.get_rank()}.pt")
    return found


def case_together(folder: Path, big: bool) -> Found:
    """What one rank alone meets, and all of them must hear of."""
    return {
        "stops": stops_alike(),
        "fails": fails_alike(folder / "failing"),
        "goes on": goes_on(folder / "going on"),
        "averaged": averaged(),
    }


def main(folder: Path, cases: list[str]) -> None:
    dist.init_process_group("gloo")
    found = {}
    for case in cases:
        name, _, size = case.partition(":")
        start = time.monotonic()
        found[case] = globals()[f"case_{name}"](folder, size == "big")
        found[f"{case} seconds"] = time.monotonic() - start
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(Path(sys.argv[1]), sys.argv[2:])
