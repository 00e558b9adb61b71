"""What a training step reserves on a CUDA device: the peak of its segments, and which allocator setting is best.

Note [Tight devices]
    A request that the driver does not serve makes the allocator give back all segments that nothing lives in, and ask
    again. So a step runs on a device with less memory than it reserves on a bigger one, if more slowly. The least with
    which it does is searched for by halves: no rule says that more memory than enough is enough too, but steps are so.

Note [Between the ends]
    Where workspaces are a range, the largest need not reserve most: a small one that finds no room takes a segment,
    and what fills it next leaves other gaps. So parts of them are simulated too, and the most of all counts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from memfit.ir import Graph, LossMemory, OptimizerMemory, Program
from memfit.plan.allocator.requests import (
    USUAL_SETTINGS,
    AllocatorRun,
    Request,
    best_run,
    compare_settings,
    run_requests,
)
from memfit.plan.step_requests import step_requests
from memfit.units import format_bytes

_LEAST_WITHIN = 0.002  # of what is reserved: how near the least memory is searched
_NOTICEABLE_SHARE = 0.01  # of what is reserved: a setting that saves less is not worth setting


WORKSPACE_SHARES = (0.25, 0.5, 1.0)  # of the largest workspaces, see Note [Between the ends]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReservedMemory:
    """The peaks of a step in a simulation of CUDA's caching allocator, from an empty one on."""

    allocated_bytes: int  # blocks handed out, as `torch.cuda.max_memory_allocated` counts them
    reserved_bytes: int  # segments, as `torch.cuda.max_memory_reserved` counts them
    best_setting: str  # for PYTORCH_CUDA_ALLOC_CONF; "": the defaults do as well
    best_reserved_bytes: int  # under that setting
    least_bytes: int  # of a device, beside its context, on which the step still runs, see Note [Tight devices]

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes reserved beyond the most that is allocated."""
        return self.reserved_bytes - self.allocated_bytes

    def words(self) -> str:
        """Say in one line what is reserved, and which setting is best."""
        words = (
            f"reserved {format_bytes(self.reserved_bytes)} by the caching allocator, "
            f"{format_bytes(self.fragmentation_bytes)} more than it hands out"
        )
        if not self.best_setting:
            return words
        return f"{words}; {format_bytes(self.best_reserved_bytes)} with {self.best_setting}"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"fragmentation_bytes": self.fragmentation_bytes}


def shared(workspaces: Sequence[int], share: float) -> list[int]:
    """Return a share of every workspace.

    >>> shared([10, 3], 0.5)
    [5, 1]
    """
    return [int(share * each) for each in workspaces]


def highest_of(found: Sequence[ReservedMemory]) -> ReservedMemory:
    """Return the most that any of several simulations takes, of each figure."""
    return ReservedMemory(
        allocated_bytes=max(each.allocated_bytes for each in found),
        reserved_bytes=max(each.reserved_bytes for each in found),
        best_setting="",
        best_reserved_bytes=max(each.best_reserved_bytes for each in found),
        least_bytes=max(each.least_bytes for each in found),
    )


def _within(requests: Sequence[Request], free: AllocatorRun, capacity_bytes: int | None) -> AllocatorRun:
    """Run requests again inside a capacity, if more is reserved without one and they go through."""
    if capacity_bytes is None or free.peak_reserved_bytes <= capacity_bytes:
        return free
    tight = run_requests(requests, free.settings, capacity_bytes=capacity_bytes)
    return free if tight.out_of_memory_at is not None else tight


def _least_bytes(requests: Sequence[Request], free: AllocatorRun) -> int:
    """Search the least capacity in which requests go through."""
    too_little, enough = free.peak_allocated_bytes - 1, free.peak_reserved_bytes
    while enough - too_little > max(1, _LEAST_WITHIN * free.peak_reserved_bytes):
        middle = (too_little + enough) // 2
        run = run_requests(requests, free.settings, capacity_bytes=middle)
        too_little, enough = (too_little, middle) if run.out_of_memory_at is None else (middle, enough)
    return enough


def reserved_memory(
    graph: Graph,
    program: Program,
    *,
    workspace_bytes: Sequence[int] = (),
    optimizer: OptimizerMemory | None = None,
    loss: LossMemory | None = None,
    handles: Mapping[int, int] | None = None,
    capacity_bytes: int | None = None,
    compares: bool = True,
) -> ReservedMemory:
    """Simulate the allocator under a program; arguments are those of `simulate` and `step_requests`.

    Settings beside the defaults are compared where that is wished for.
    Where a device has no more than `capacity_bytes`, the allocator gives back what it caches before it gives up, so
    less is reserved there, see Note [Tight devices].
    """
    requests = step_requests(
        graph, program, workspace_bytes=workspace_bytes, optimizer=optimizer, loss=loss, handles=handles
    )
    settings = USUAL_SETTINGS if compares else USUAL_SETTINGS[:1]
    runs = [_within(requests, each, capacity_bytes) for each in compare_settings(requests, settings)]
    default, best = runs[0], best_run(runs)
    saved_bytes = default.peak_reserved_bytes - best.peak_reserved_bytes
    if saved_bytes <= _NOTICEABLE_SHARE * default.peak_reserved_bytes:
        best = default
    return ReservedMemory(
        allocated_bytes=default.peak_allocated_bytes,
        reserved_bytes=default.peak_reserved_bytes,
        best_setting=str(best.settings),
        best_reserved_bytes=best.peak_reserved_bytes,
        least_bytes=_least_bytes(requests, default),
    )
