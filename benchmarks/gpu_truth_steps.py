"""The estimate of one recorded step, as the process that ran it had been used before."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Sequence

import torch

import memfit
from benchmarks.gpu_truth_cases import Case
from memfit.ir import Kind
from memfit.plan.allocator.caching import CachingAllocator, OutOfDeviceMemory
from memfit.plan.allocator.device import DeviceMemory
from memfit.plan.allocator.requests import Allocate, Release
from memfit.plan.reserved import WORKSPACE_SHARES, shared
from memfit.plan.step_requests import step_requests
from memfit.unplanned import UnplannedStep, unplanned_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """The most that a step allocates and reserves."""

    allocated_bytes: int
    reserved_bytes: int


def estimated(case: Case, by_row: dict[int, Case]) -> tuple[Peaks, Peaks]:
    """Return the least peaks of a case and the most that libraries can make of them, without margins.

    `by_row` has the cases that ran before.
    """
    if case.earlier:
        steps = [_step(by_row[row]) for row in case.earlier] + [_step(case)]
        low, *others = (_after_others(steps, share) for share in (0.0, *WORKSPACE_SHARES))
        return low, _most([low, *others])
    estimate = _step(case).estimate()
    assert estimate.reserved is not None
    found = [estimate.reserved] + ([] if estimate.highest is None else [estimate.highest.reserved])
    peaks = [Peaks(allocated_bytes=each.allocated_bytes, reserved_bytes=each.reserved_bytes) for each in found]
    return peaks[0], _most(peaks)


def _most(found: Sequence[Peaks]) -> Peaks:
    allocated, reserved = (max(getattr(each, f"{name}_bytes") for each in found) for name in ("allocated", "reserved"))
    return Peaks(allocated_bytes=allocated, reserved_bytes=reserved)


@functools.cache
def _step(case: Case) -> UnplannedStep:
    with warnings.catch_warnings(), _searching(case.searches):
        warnings.simplefilter("ignore")  # of libraries that are built without weights
        with memfit.without_weights():
            model, batch = case.make()
        return unplanned_step(
            model,
            batch,
            loss=case.loss,
            optimizer=case.optimizer,
            device=case.device,
            measure=None,
            backward_from="auto",
            progress=None,
            loop=memfit.Loop(gradients=case.gradients, outputs=case.outputs, backward=not case.forward_only),
        )


@contextlib.contextmanager
def _searching(searches: bool) -> Iterator[None]:
    was = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = searches
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = was


def _after_others(steps: Sequence[UnplannedStep], share: float) -> Peaks:
    """Run steps one after another, each from an emptied cache, and return the peaks of the last.

    Models and their gradients stay, batches go. cuBLAS takes its workspaces once for all. A workspace for which the
    device has no room is left out: torch goes on with a smaller one.
    """
    allocator = CachingAllocator(None, DeviceMemory(steps[-1].capacity_bytes))
    addresses: dict[tuple[int, int], int] = {}
    has_handles = False
    for number, step in enumerate(steps):
        assert step.libraries is not None
        allocator.empty_cache()
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes = (
            allocator.allocated_bytes,
            allocator.reserved_bytes,
        )
        requests = step_requests(
            step.graph,
            step.program,
            workspace_bytes=[
                max(each) for each in zip(shared(step.libraries.highest, share), step.workspace_bytes, strict=True)
            ],
            optimizer=step.optimizer_memory,
            handles={} if has_handles else step.libraries.handles,
        )
        has_handles = has_handles or bool(step.libraries.handles)
        for request in requests:
            if isinstance(request, Allocate) and request.size_bytes:
                with contextlib.suppress(OutOfDeviceMemory):
                    addresses[number, request.handle] = allocator.allocate(request.size_bytes)
            elif isinstance(request, Release) and (number, request.handle) in addresses:
                allocator.free(addresses.pop((number, request.handle)))
        for place, storage in enumerate(step.graph.resident):  # resident storages are asked for first, in this order
            if step.graph.storages[storage].kind is Kind.BATCH and (number, place) in addresses:
                allocator.free(addresses.pop((number, place)))
    return Peaks(allocated_bytes=allocator.peak_allocated_bytes, reserved_bytes=allocator.peak_reserved_bytes)
