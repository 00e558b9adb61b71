"""One case on a GPU: its estimate, its plans and what they make, beside what is measured."""

import copy
import dataclasses
from typing import Any, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

import memfit
from benchmarks.models import Case
from memfit.accelerator import synchronize
from memfit.errors import MemfitError, first_line
from memfit.prove.profile import profile

PLANS: dict[str, dict[str, Any]] = {
    "half of the activations": {},
    "half, by offloading alone": {"allow": ("offload",)},
}
_SHARE = 0.5  # of the activations


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanResult:
    """What a plan predicted, and what was measured."""

    name: str
    refused: str = ""  # why there is none
    budget_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    slowdown: float = 0.0
    predicted_slowdown: float = 0.0
    differing: tuple[str, ...] = ()  # tensors that are not those of eager, though two eager steps make the same


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuResult:
    """What was seen of a case."""

    case: str
    estimated_bytes: int
    estimated_highest_bytes: int
    measured_bytes: int
    estimated_reserved_bytes: int
    measured_reserved_bytes: int
    undecided: tuple[str, ...]  # what two eager steps make differently
    plans: tuple[PlanResult, ...]

    @property
    def error(self) -> float:
        """Return how far the estimate is off."""
        return self.estimated_bytes / self.measured_bytes - 1

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields | {"plans": tuple(PlanResult(**each) for each in fields["plans"])})


def run_case(case: Case, device: torch.device, *, search_s: float = 5.0, pairs: int = 5) -> GpuResult:
    """Check one case; the process should have nothing else on the device."""
    torch.manual_seed(0)
    model = case.make_model().train().to(device)
    batch = pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), case.make_batch(case.batch_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    estimate = memfit.estimate(model, batch, loss=case.loss, optimizer=optimizer)
    measured_bytes, reserved_bytes = _peaks(case, copy.deepcopy(model), batch, device)
    made = [_made(case, model, batch) for _ in range(2)]
    undecided = _differing(*made)
    highest = estimate.peak_bytes if estimate.highest is None else estimate.highest.peak_bytes
    return GpuResult(
        case=str(case),
        estimated_bytes=estimate.peak_bytes,
        estimated_highest_bytes=highest,
        measured_bytes=measured_bytes,
        estimated_reserved_bytes=estimate.reserved_bytes or 0,
        measured_reserved_bytes=reserved_bytes,
        undecided=undecided,
        plans=tuple(_plan(case, model, batch, made[0], undecided, name, search_s, pairs) for name in PLANS),
    )


def _peaks(case: Case, model: nn.Module, batch: Any, device: torch.device) -> tuple[int, int]:
    """Allocated and reserved bytes of a later training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    spare_bytes = 0
    for number in range(3):
        optimizer.zero_grad()
        if number == 2:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(device)
            spare_bytes = sum(each.nbytes for each in model.parameters()) + sum(each.nbytes for each in model.buffers())
        case.loss(model, batch).backward()
        optimizer.step()
    synchronize(device)
    accelerator: Any = torch.accelerator
    peaks = accelerator.max_memory_allocated(device), accelerator.max_memory_reserved(device)
    return peaks[0] - spare_bytes, peaks[1] - spare_bytes  # the model that this one is a copy of lives beside it


def _made(case: Case, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Make loss and gradients from a fixed seed, on the host."""
    twin = copy.deepcopy(model)
    return _step_of(case, twin, batch)


def _step_of(case: Case, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = case.loss(model, batch)
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {
        name: each.detach().cpu() for name, each in {"loss": loss, **gradients, **dict(model.named_buffers())}.items()
    }


def _differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[str, ...]:
    return tuple(name for name in one if name not in other or not torch.equal(one[name], other[name]))


def _plan(
    case: Case,
    model: nn.Module,
    batch: Any,
    eager: dict[str, torch.Tensor],
    undecided: tuple[str, ...],
    name: str,
    search_s: float,
    pairs: int,
) -> PlanResult:
    sample = case.sample(batch)
    try:
        whole = memfit.plan(model, sample, time_limit=1.0, **PLANS[name])
        kept_bytes = whole.persistent_bytes
        budget_bytes = kept_bytes + int(_SHARE * (whole.unplanned_peak_bytes - kept_bytes))
        plan = memfit.plan(model, sample, budget=budget_bytes, time_limit=search_s, **PLANS[name])
    except MemfitError as error:
        return PlanResult(name=name, refused=first_line(error))
    planned = copy.deepcopy(model)
    memfit.apply(plan, planned, sample)
    differing = tuple(each for each in _differing(eager, _step_of(case, planned, batch)) if each not in undecided)
    seen = profile(copy.deepcopy(model), plan, sample, eager=True, pairs=pairs)
    return PlanResult(
        name=name,
        budget_bytes=budget_bytes,
        predicted_bytes=plan.peak_bytes,
        measured_bytes=seen.peak_bytes,
        slowdown=seen.slowdown or 0.0,
        predicted_slowdown=plan.slowdown,
        differing=differing,
    )
