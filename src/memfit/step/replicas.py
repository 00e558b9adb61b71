"""A step whose model is inside DistributedDataParallel: n ranks do what one would on the batches of all.

Note [Replicas]
    DDP averages gradients over ranks in the backward pass; of several passes before an update only the last does
    so, the others run under `no_sync`. An average over ranks is the mean over all samples only if every rank counts
    the same, so before that pass the ranks add up what their losses are means of, and each divides by its share of
    the sum. In the same message, at the end of every batch, a rank says that its loss is not finite: then all of
    them stop at this step, and none waits for another. Until then it runs forward as the others do.

Note [Sharded]
    A model that FSDP2 divides communicates in every forward and backward pass. So a rank whose loss is not finite goes
    through its backward pass as the others do, and all of them stop at the end of the batch. Losses are averaged over
    ranks as they are, whatever they are means of.
"""

import contextlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memfit.collectives import average, summed


class Replicas:
    """The ranks that train one model together; one, if it is not inside DDP."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._device = device
        meshes = (getattr(each, "device_mesh", None) for each in model.parameters())
        self._mesh = None if self._ddp is not None else next((mesh for mesh in meshes if mesh is not None), None)
        self.module: nn.Module = model if self._ddp is None else self._ddp.module  # the model itself

    @property
    def count(self) -> int:
        return 1 if self._ddp is None else int(self._ddp.process_group.size())

    @property
    def size(self) -> int:
        """How many ranks take part, replicated or sharded."""
        return self.count if self._mesh is None else int(self._mesh.size())

    @property
    def is_sharded(self) -> bool:
        return self._mesh is not None

    @property
    def wait_for_each_other(self) -> bool:
        """Whether a rank that stops alone would leave others waiting."""
        return self.count > 1 or self.is_sharded

    def passing(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """What a forward and a backward pass run in, the last before an update or an earlier one."""
        if self._ddp is None or is_last:
            return contextlib.nullcontext()
        return self._ddp.no_sync()

    def share_of(self, weight: float, *, failed: bool = False) -> tuple[float, int]:
        """A rank's share of all weights together, and how many ranks failed. Once for every batch, on all ranks."""
        if self._mesh is not None:
            failures = float(failed)
            for dimension in range(self._mesh.ndim):
                (failures,) = summed([failures], self._device, self._mesh.get_group(dimension))
            return weight, int(failures)
        if self._ddp is None:
            return weight, int(failed)
        total, failures = summed([weight, float(failed)], self._device, self._ddp.process_group)
        return total / self.count, int(failures)

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average what was accumulated without the last pass; a rank that did not use a parameter counts as zero."""
        if self._ddp is None:
            return
        own = [float(each.grad is not None) for each in parameters]
        users = summed(own, self._device, self._ddp.process_group)
        used = [each for each, count in zip(parameters, users, strict=True) if count]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            average([each.grad for each in used], self._ddp.process_group)
