"""Sums over the processes of a run, in messages of some size."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_MESSAGE_BYTES = 25 * 2**20  # as big as DDP's buckets


def average(tensors: Iterable[torch.Tensor | None], group: Any = None) -> None:
    """Average over ranks, in place; small ones together, so that no more than `_MESSAGE_BYTES` are copied."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.nbytes > _MESSAGE_BYTES and tensor.is_contiguous():
            dist.all_reduce(tensor.div_(dist.get_world_size(group)), group=group)
            continue
        waiting = by_kind.setdefault((tensor.dtype, tensor.device), [])
        if waiting and sum(each.nbytes for each in waiting) + tensor.nbytes > _MESSAGE_BYTES:
            _average_together(waiting, group)
            waiting.clear()
        waiting.append(tensor)
    for waiting in by_kind.values():
        _average_together(waiting, group)


def _average_together(parts: Sequence[torch.Tensor], group: Any) -> None:
    line = torch.cat([part.reshape(-1) for part in parts]).div_(dist.get_world_size(group))
    dist.all_reduce(line, group=group)
    for part, averaged in zip(parts, line.split([part.numel() for part in parts]), strict=True):
        part.copy_(averaged.view_as(part))


def summed(numbers: Sequence[float], device: torch.device, group: Any = None) -> list[float]:
    """Numbers added up over ranks."""
    line = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(line, group=group)
    return [float(each) for each in line.tolist()]
