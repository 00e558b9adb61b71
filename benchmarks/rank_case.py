"""One rank of one real run: what its third step takes, by the allocator's own events, beside what was predicted.

python -m benchmarks.rank_case CASE STRATEGY   (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment)
"""

import itertools
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import memfit
from benchmarks.models import Case, rank_cases
from memfit import distributed
from memfit._memory_events import marked_memory_events, set_mark
from memfit.cli.torchvision_repair import prepare
from memfit.measure.peak import held_bytes

STRATEGIES = ("ddp", "ddp with views", "zero1", "fsdp", "planned ddp")
_STEPS = 5
_TIME_LIMIT_S = 4.0  # to look for the smallest plan


def main(name: str, strategy: str) -> None:
    prepare()
    logging.disable(logging.WARNING)  # of libraries that look for a GPU
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = next(each for each in rank_cases() if each.name == name)
    predicted_bytes, plan = predicted(case, strategy)
    measured_bytes = measured(case, strategy, plan)
    print(json.dumps({"rank": dist.get_rank(), "predicted": predicted_bytes, "measured": measured_bytes}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def predicted(case: Case, strategy: str) -> tuple[int, Any]:
    """The peak of this rank before anything is run, and the plan if there is one."""
    model = case.make_model().train()
    batch = case.make_batch(case.batch_size)
    if strategy == "planned ddp":
        return _planned(case, model, batch)
    kind = strategy.partition(" ")[0]
    estimate = distributed.estimate(
        model,
        batch,
        loss=case.loss,
        optimizer="adamw",
        world_size=dist.get_world_size(),
        shard=kind,
        rank=dist.get_rank(),
        buckets=distributed.BucketPolicy(views=strategy.endswith("views")),
    )
    return estimate.peak_bytes, None


def _planned(case: Case, model: nn.Module, batch: Any) -> tuple[int, Any]:
    sample, outputs = case.sample(batch), case.outputs or "all"
    plan = distributed.plan(
        model, sample, budget="smallest", optimizer="adamw", outputs=outputs, time_limit=_TIME_LIMIT_S
    )
    return plan.peak_bytes, plan


def measured(case: Case, strategy: str, plan: Any) -> int:
    """The most that lives in a step from the third on: by then optimizer state and the final buckets exist.

    Buffers are at times released by threads of gloo, which the profiler does not see. So every step starts from
    what is held, DDP's buckets by its own account, and the least of several steps is taken: a release that is not
    seen only adds.
    """
    held: list[int] = []

    def run() -> None:
        torch.manual_seed(dist.get_rank())
        model = case.make_model().train()
        batch = case.make_batch(case.batch_size)
        if plan is not None:
            memfit.apply(plan, model)
        trained, optimizer = _divided(model, strategy)
        for number in range(_STEPS):
            if number >= 2:
                own = held_bytes(_local([*model.parameters(), *model.buffers(), batch, optimizer]))
                held.append(own + _bucket_bytes(trained))
                set_mark(f"step {number}")
            optimizer.zero_grad(set_to_none=True)
            loss = case.loss(trained, batch)
            loss.backward()
            optimizer.step()
            del loss
            if strategy.endswith("views"):
                optimizer.zero_grad(set_to_none=True)  # they are in the buckets, which are counted

    events = marked_memory_events(run)
    live = list(itertools.accumulate(change for _, change in events))
    starts = [place for place, (label, _) in enumerate(events) if label]
    peaks = [max(live[start:end]) for start, end in itertools.pairwise([*starts, len(live)])]
    return min(peak - live[start] + own for peak, start, own in zip(peaks, starts, held, strict=True))


def _bucket_bytes(model: nn.Module) -> int:
    if not isinstance(model, DistributedDataParallel):
        return 0
    account = model._get_ddp_logging_data()
    sizes = account.get("rebuilt_bucket_sizes") or account["bucket_sizes"]
    return sum(int(size) for size in str(sizes).split(","))


def _local(holders: list[Any]) -> Iterator[Any]:
    """Tensors of this rank alone, gradients of parameters included."""
    for holder in holders:
        if isinstance(holder, torch.optim.Optimizer):
            own = getattr(holder, "optim", holder)  # of ZeroRedundancyOptimizer: this rank's share
            yield from _local([value for state in own.state.values() for value in state.values()])
            continue
        gradient = holder.grad if isinstance(holder, nn.Parameter) else None
        for each in (holder, gradient):
            yield each.to_local() if isinstance(each, DTensor) else each


def _divided(model: nn.Module, strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if strategy == "fsdp":
        for name in distributed.unit_names(model):
            fully_shard(model.get_submodule(name))
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters())
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=strategy.endswith("views"))
    if strategy == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # the import warns

        return wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    return wrapped, torch.optim.AdamW(model.parameters())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
