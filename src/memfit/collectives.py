"""Sums over the processes of a run, as one message for each dtype."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def average(tensors: Iterable[torch.Tensor | None], group: Any = None) -> None:
    """Average over ranks, in place."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor is not None:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for parts in by_kind.values():
        line = torch.cat([part.reshape(-1) for part in parts]).div_(dist.get_world_size(group))
        dist.all_reduce(line, group=group)
        for part, averaged in zip(parts, line.split([part.numel() for part in parts]), strict=True):
            part.copy_(averaged.view_as(part))


def summed(numbers: Sequence[float], device: torch.device, group: Any = None) -> list[float]:
    """Numbers added up over ranks."""
    line = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(line, group=group)
    return [float(each) for each in line.tolist()]
