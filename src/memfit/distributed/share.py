"""What one rank holds beside the captured step: DDP's buckets and its share of the optimizer's state."""

from torch import nn

from memfit.describe import is_for_accelerator
from memfit.distributed.buckets import BucketPolicy, bucket_bytes
from memfit.distributed.zero import divided_optimizer_memory
from memfit.errors import InvalidInput
from memfit.ir import OptimizerMemory
from memfit.measure.optimizer import KnownMemory, OptimizerLike, check_optimizer, optimizer_memory, optimizer_name


def rank_memory(
    model: nn.Module,
    optimizer: OptimizerLike | None,
    *,
    shard: str | None,
    world_size: int,
    buckets: BucketPolicy | None = None,
) -> OptimizerLike | None:
    """What to plan with as the optimizer of one rank.

    A captured backward pass hands its gradients out together, so the buckets are beside them whether or not they are
    views, see Note [Buckets].
    """
    if shard is None:
        return optimizer
    if shard not in ("ddp", "zero1"):
        raise InvalidInput(f'a plan counts shard="ddp", "zero1" or None (the model alone), {shard!r} was given')
    check_optimizer(optimizer)
    parameters = list(model.parameters())
    held_bytes = sum(bucket_bytes(parameters, buckets))
    memory, name = OptimizerMemory(), "the buckets of DDP"
    if optimizer is not None:
        name = f"{optimizer_name(optimizer)} and {name}"
        for_cuda = is_for_accelerator(model, None)
        if shard == "ddp":
            memory = optimizer_memory(optimizer, parameters, for_cuda=for_cuda)
        else:
            memory = divided_optimizer_memory(
                optimizer, parameters, world_size=world_size, rank=None, for_cuda=for_cuda, without_gradient=()
            )
    return KnownMemory(
        name=name,
        memory=OptimizerMemory(state_bytes=memory.state_bytes + held_bytes, workspace_bytes=memory.workspace_bytes),
    )
