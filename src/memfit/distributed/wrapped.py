"""Models inside DistributedDataParallel."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def inner(model: nn.Module) -> nn.Module:
    """The model itself, if it is inside DDP."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model
