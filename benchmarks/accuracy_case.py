"""One standard case: its estimate, its real peak, and its captured run beside the eager one."""

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

import memfit
from benchmarks.models import Case
from memfit.measure.peak import measure_peak

SECONDS = 20.0  # for the interleaved runs of one case
LEAST_PAIRS = 7

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimateResult:
    optimizer: str
    estimated_bytes: int
    measured_bytes: int
    peak_phase: str

    @property
    def error(self) -> float:
        return self.estimated_bytes / self.measured_bytes - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseResult:
    case: str
    estimates: list[EstimateResult]
    capture_s: float
    loss: bool  # this and the next three: equal to eager bit for bit
    gradients: bool
    buffers: bool
    generator: bool
    eager_peak_bytes: int
    captured_peak_bytes: int
    eager_step_s: float
    time_ratio: float  # median over interleaved pairs of steps

    @property
    def differing(self) -> list[str]:
        """What does not equal eager bit for bit."""
        return [name for name in ("loss", "gradients", "buffers", "generator") if not getattr(self, name)]

    @property
    def is_equal(self) -> bool:
        return not self.differing

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields | {"estimates": [EstimateResult(**each) for each in fields["estimates"]]})


def run_case(case: Case) -> CaseResult:
    torch.manual_seed(0)
    model = case.make_model().train()
    batch = case.make_batch(case.batch_size)
    estimates = [_estimate(case, model, batch, name) for name in OPTIMIZERS]
    return CaseResult(case=str(case), estimates=estimates, **_round_trip(case, model, batch))


def _estimate(case: Case, model: nn.Module, batch: Any, optimizer_name: str) -> EstimateResult:
    prediction = memfit.estimate(model, batch, loss=case.loss, optimizer=optimizer_name)
    trained = copy.deepcopy(model)
    optimizer = OPTIMIZERS[optimizer_name](trained.parameters())

    def step() -> None:
        optimizer.zero_grad()
        case.loss(trained, batch).backward()
        optimizer.step()

    step()  # the state of the optimizer exists from the second step on
    optimizer.zero_grad()
    measured = measure_peak(step, resident=[trained, optimizer, batch])
    return EstimateResult(
        optimizer=optimizer_name,
        estimated_bytes=prediction.peak_bytes,
        measured_bytes=measured.peak_bytes,
        peak_phase=prediction.peak_phase,
    )


def _round_trip(case: Case, eager: nn.Module, batch: Any) -> dict[str, Any]:
    captured = copy.deepcopy(eager)
    start = time.perf_counter()
    memfit.fit(captured, case.sample(batch))
    capture_s = time.perf_counter() - start
    batch = case.make_batch(case.batch_size)  # another one: nothing of the captured one may be baked in
    eager_end, captured_end = (_two_steps(case, model, batch) for model in (eager, captured))
    eager_s, time_ratio = _interleaved(case, eager, captured, batch)
    return {
        "capture_s": capture_s,
        "loss": _equal(eager_end.losses, captured_end.losses),
        "gradients": _equal(eager_end.gradients, captured_end.gradients),
        "buffers": _equal(list(eager.buffers()), list(captured.buffers())),
        "generator": torch.equal(eager_end.generator, captured_end.generator),
        "eager_peak_bytes": _peak(case, eager, batch),
        "captured_peak_bytes": _peak(case, captured, batch),
        "eager_step_s": eager_s,
        "time_ratio": time_ratio,
    }


@dataclasses.dataclass
class _End:
    losses: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    generator: torch.Tensor


def _two_steps(case: Case, model: nn.Module, batch: Any) -> _End:
    """Losses, gradients (accumulated over two steps) and generator state, from a fixed seed."""
    torch.manual_seed(1)
    model.zero_grad()
    losses = []
    for _ in range(2):
        losses.append(case.loss(model, batch))
        losses[-1].backward()
    return _End(
        losses=[loss.detach() for loss in losses],
        gradients=[parameter.grad for parameter in model.parameters()],
        generator=torch.get_rng_state(),
    )


def _equal(ones: list[Any], others: list[Any]) -> bool:
    return len(ones) == len(others) and all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(ones, others, strict=True)
    )


def _peak(case: Case, model: nn.Module, batch: Any) -> int:
    model.zero_grad()

    def step() -> None:
        model.zero_grad()
        case.loss(model, batch).backward()

    peak_bytes = measure_peak(step, resident=[model, batch]).peak_bytes
    model.zero_grad()
    return peak_bytes


def _interleaved(case: Case, eager: nn.Module, captured: nn.Module, batch: Any) -> tuple[float, float]:
    """Seconds of an eager step, and the ratio to it: medians over pairs of steps in both orders."""
    _seconds(case, eager, batch)
    _seconds(case, captured, batch)
    eager_times: list[float] = []
    ratios: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(ratios) < LEAST_PAIRS or time.perf_counter() < end:
        pair = (eager, captured) if len(ratios) % 2 else (captured, eager)
        seconds = {id(model): _seconds(case, model, batch) for model in pair}
        eager_times.append(seconds[id(eager)])
        ratios.append(seconds[id(captured)] / seconds[id(eager)])
    return statistics.median(eager_times), statistics.median(ratios)


def _seconds(case: Case, model: nn.Module, batch: Any) -> float:
    model.zero_grad()
    start = time.perf_counter()
    case.loss(model, batch).backward()
    return time.perf_counter() - start
