"""Optimizer state that is divided over ranks as `ZeroRedundancyOptimizer` divides it (ZeRO, stage 1).

Every rank keeps the state of whole parameters and updates those; then each sends what it updated to all others,
parameter by parameter and in place, so nothing is held beside the state.
"""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from memfit.ir import OptimizerMemory
from memfit.measure.optimizer import OptimizerLike, optimizer_memory
from memfit.optimizer_twin import empty_twin


def partition(groups: Sequence[Sequence[nn.Parameter]], world_size: int) -> list[list[list[nn.Parameter]]]:
    """By rank and group: each parameter, biggest first, goes to the rank that has least so far."""
    shares: list[list[list[nn.Parameter]]] = [[[] for _ in groups] for _ in range(world_size)]
    elements = [0] * world_size
    for number, group in enumerate(groups):
        for parameter in sorted(group, key=lambda each: each.numel(), reverse=True):
            rank = elements.index(min(elements))
            shares[rank][number].append(parameter)
            elements[rank] += parameter.numel()
    return shares


def divided_optimizer_memory(
    optimizer: OptimizerLike,
    parameters: Sequence[nn.Parameter],
    *,
    world_size: int,
    rank: int | None,
    for_cuda: bool,
    without_gradient: Sequence[nn.Parameter],
) -> OptimizerMemory:
    """What the optimizer takes on one rank; without a rank, on the one that has most."""
    groups = (
        [group["params"] for group in optimizer.param_groups]
        if isinstance(optimizer, Optimizer)
        else [[each for each in parameters if each.requires_grad]]
    )
    shares = partition(groups, world_size)
    own = max(shares, key=_bytes) if rank is None else shares[rank]
    return optimizer_memory(
        over_groups(optimizer, own),
        [each for group in own for each in group],
        for_cuda=for_cuda,
        without_gradient=without_gradient,
    )


def over_groups(optimizer: OptimizerLike, groups: Sequence[Sequence[nn.Parameter]]) -> OptimizerLike:
    """The same optimizer without state, over other parameters; what is no instance yet is returned as it is."""
    if not isinstance(optimizer, Optimizer):
        return optimizer
    twin = empty_twin(optimizer)
    twin.param_groups = [
        group | {"params": list(own)} for group, own in zip(optimizer.param_groups, groups, strict=True)
    ]
    return twin


def _bytes(groups: Sequence[Sequence[nn.Parameter]]) -> int:
    return sum(each.numel() * each.element_size() for group in groups for each in group)
