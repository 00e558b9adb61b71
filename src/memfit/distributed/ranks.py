"""The processes of a data-parallel run, on any backend of torch.distributed.

Note [Equal on all ranks]
    Gradients are averaged over ranks before anything that is not linear in them happens: before clipping,
    before an optimizer's step, before a finite difference is scaled by their length, and in every product with
    the curvature. So n ranks compute what one would on the whole batch, and parameters stay equal.
"""

import logging
import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from memfit.accelerator import device_of_backend
from memfit.collectives import average

log = logging.getLogger(__name__)


class Ranks:
    """One process, or all that torchrun started."""

    def __init__(self, *, distributed: bool = True, backend: str | None = None, on_cuda: bool = False) -> None:
        self.rank, self.world_size = 0, 1
        if not distributed:
            return
        if not dist.is_initialized():
            if "RANK" not in os.environ:
                log.warning("distributed=True, but torchrun started no processes: running as one")
                return
            dist.init_process_group(backend or ("nccl" if on_cuda else "gloo"))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @property
    def several(self) -> bool:
        return self.world_size > 1

    def average(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Average over ranks, in place; one message for each dtype. See Note [Equal on all ranks]."""
        if self.several:
            average(tensors)

    def averaged(
        self, gradients: list[torch.Tensor | None], parameters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Gradients averaged; a parameter that a rank's share did not use counts as zero there."""
        if not self.several:
            return gradients
        whole = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for gradient, parameter in zip(gradients, parameters, strict=True)
        ]
        self.average(whole)
        return [*whole]

    def start_equal(self, module: nn.Module) -> None:
        """All ranks begin with the parameters and buffers of the first."""
        if self.several:
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def agreed(self, decision: bool) -> bool:
        """What the first rank decided."""
        if not self.several:
            return decision
        flag = torch.tensor(int(decision), device=device_of_backend())
        dist.broadcast(flag, src=0)
        return bool(flag.item())
