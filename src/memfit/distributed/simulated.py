"""The memory of one rank among several, without any of them: simulated ranks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from memfit.describe import is_for_accelerator
from memfit.distributed.buckets import BucketPolicy, with_buckets
from memfit.distributed.shards import sharded_optimizer_memory, with_shards
from memfit.distributed.wrapped import inner
from memfit.distributed.zero import divided_optimizer_memory
from memfit.errors import InvalidInput
from memfit.estimate import Estimate, OutsideBytes
from memfit.ir import OptimizerMemory
from memfit.measure.cuda_libraries import NCCL_REASON, nccl_bytes
from memfit.measure.devices import find_device
from memfit.measure.optimizer import OptimizerLike
from memfit.measure.probe import Progress
from memfit.unplanned import Loss, UnplannedStep, unplanned_step

STRATEGIES = {
    "ddp": "whole parameters and optimizer state on every rank, gradients added up in buckets",
    "zero1": "as ddp, and every rank keeps the optimizer state of its share of the parameters",
    "fsdp": "parameters, gradients and optimizer state in shares; a unit is whole only while it runs",
}


def estimate(
    model: nn.Module,
    sample: Any,
    *,
    world_size: int,
    shard: str = "ddp",
    optimizer: OptimizerLike | None = None,
    buckets: BucketPolicy | None = None,
    units: Sequence[str] | None = None,
    rank: int | None = None,
    loss: Loss | None = None,
    device: str | None = None,
    measure: bool | None = None,
    backward_from: str = "auto",
    progress: Progress | None = None,
) -> Estimate:
    """Predict the peak memory of one rank of a training step; no process group is needed and nothing is run.

    `sample` is the share of the batch that one rank gets. `shard` is one of `STRATEGIES`; `buckets` says how
    DDP is set up, `units` names the modules that FSDP shards by themselves (patterns; by default the blocks of
    the outermost lists of modules). `rank` matters for "zero1", whose shares differ; without it the fullest is
    meant. The other keywords are those of `memfit.estimate`.
    """
    check_world(world_size, shard)
    model = inner(model)
    step = unplanned_step(
        model,
        sample,
        optimizer=optimizer,
        loss=loss,
        device=device,
        measure=measure,
        backward_from=backward_from,
        progress=progress,
    )
    if world_size > 1:
        step = dataclasses.replace(step, outside_a_loop=None)
        step = _on_a_rank(step, model, optimizer, device, world_size, shard, buckets or BucketPolicy(), units, rank)
    found = dataclasses.replace(step, notes=(*step.notes, _note(world_size, shard))).estimate()
    capability = None if device is None else find_device(device).capability
    if world_size == 1 or capability is None:
        return found
    lowest_bytes, highest_bytes = nccl_bytes(capability)
    outside = OutsideBytes(lowest_bytes=lowest_bytes, highest_bytes=highest_bytes, reason=NCCL_REASON)
    return dataclasses.replace(found, outside=outside)


def check_world(world_size: int, shard: str) -> None:
    """Refuse a number of ranks or a strategy that does not exist."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise InvalidInput(f"a world has at least one rank, {world_size!r} was given")
    if shard not in STRATEGIES:
        known = "; ".join(f"{name!r} ({meaning})" for name, meaning in STRATEGIES.items())
        raise InvalidInput(f"unknown strategy {shard!r}; known are {known}")


def rank_optimizer_memory(
    step: UnplannedStep,
    model: nn.Module,
    optimizer: OptimizerLike | None,
    *,
    device: str | None,
    world_size: int,
    shard: str,
    rank: int | None,
) -> OptimizerMemory:
    """What the optimizer keeps and needs on one rank."""
    if optimizer is None or shard == "ddp":
        return step.optimizer_memory
    trained = {step.graph.storages[parameter].name for parameter, _ in step.graph.trained}
    for_cuda = is_for_accelerator(model, None if device is None else find_device(device))
    untrained = [parameter for name, parameter in model.named_parameters() if name not in trained]
    parameters = list(model.parameters())
    if shard == "zero1":
        return divided_optimizer_memory(
            optimizer, parameters, world_size=world_size, rank=rank, for_cuda=for_cuda, without_gradient=untrained
        )
    return sharded_optimizer_memory(
        optimizer, parameters, world_size=world_size, for_cuda=for_cuda, without_gradient=untrained
    )


def _on_a_rank(
    step: UnplannedStep,
    model: nn.Module,
    optimizer: OptimizerLike | None,
    device: str | None,
    world_size: int,
    shard: str,
    buckets: BucketPolicy,
    units: Sequence[str] | None,
    rank: int | None,
) -> UnplannedStep:
    memory = rank_optimizer_memory(step, model, optimizer, device=device, world_size=world_size, shard=shard, rank=rank)
    step = dataclasses.replace(step, optimizer_memory=memory)
    if shard == "fsdp":
        return with_shards(step, model, world_size, units)
    return with_buckets(step, model, buckets)


def _note(world_size: int, shard: str) -> str:
    if world_size == 1:
        return "one rank: nothing is divided or sent"
    return f"one of {world_size} ranks, {shard}: {STRATEGIES[shard]}"
