"""One part of one case of the frontier: the eager run, memfit at its budgets, or a peer at its settings."""

import copy
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

import memfit
from benchmarks.frontier_record import COMPILED, EAGER, MEMFIT, EagerRun, Measured, MemfitPoint, PeerPoint, Point
from benchmarks.measuring import Subject, interleaved, peak_bytes, persistent_bytes
from benchmarks.models import Case
from benchmarks.peers import peer_points, point_count
from memfit.errors import InfeasibleBudget, first_line

FRACTIONS = (0.66, 0.60, 0.53, 0.46, 0.40, 0.33)
COMPILED_FRACTIONS = (1.0, 0.66, 0.60, 0.50, 0.40, 0.33, 0.25)
QUICK_COMPILED_FRACTIONS = (1.0, 0.50, 0.33)
QUICK_FRACTIONS = (0.66, 0.53, 0.40, 0.33)  # those that promises speak of
PAIRS = 4

_planner: Any = memfit  # plan, apply, fit, plan_of and remove; tests put another one here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How much is measured, and how long it may take."""

    quick: bool = False
    plan_s: float = 10.0  # the search; capture and measuring operators come on top
    setting_s: float = 300.0  # one setting of a peer, compiling included
    pairs_s: float = 25.0  # of pairs of steps a point, where more than a few fit in
    also: tuple[float, ...] = ()  # fractions at which compiled plans are made beside the usual ones

    @property
    def part_s(self) -> float:
        """After this a part hangs, rather than being slow."""
        return 600 + (1 + point_count(quick=self.quick)) * self.setting_s


def part_points(case: Case, part: str, limits: Limits) -> Iterator[Point]:
    """The points of a part, one after the other as they are measured."""
    subject = Subject.of(case)
    if part == EAGER:
        yield eager_run(subject, with_time=True)
    elif part == MEMFIT:
        yield from memfit_points(subject, limits)
    elif part == COMPILED:
        yield from compiled_points(subject, limits)
    else:
        yield from peer_points(part, subject, quick=limits.quick, limit_s=limits.setting_s, pairs_s=limits.pairs_s)


def eager_run(subject: Subject, *, with_time: bool) -> EagerRun:
    return EagerRun(
        persistent_bytes=persistent_bytes(subject),
        peak_bytes=peak_bytes(subject, subject.model),
        step_s=interleaved(subject, subject.model, pairs=PAIRS).eager_s if with_time else 0.0,
    )


def memfit_points(subject: Subject, limits: Limits) -> Iterator[MemfitPoint]:
    eager = eager_run(subject, with_time=False)
    planned = copy.deepcopy(subject.model)
    # Another batch than the captured one: nothing of it may be baked in.
    other = dataclasses.replace(subject, batch=subject.case.make_batch(subject.case.batch_size))
    comparison = _Comparison(other)
    for fraction in (*(QUICK_FRACTIONS if limits.quick else FRACTIONS), None):
        budget = "smallest" if fraction is None else eager.budget_bytes(fraction)
        try:
            plan = _plan(subject, planned, budget, limits)
            yield MemfitPoint(
                fraction=fraction, measured=_measured(plan, budget, planned, other, comparison, limits.pairs_s)
            )
        except InfeasibleBudget as error:
            yield MemfitPoint(fraction=fraction, reason=first_line(error), is_infeasible=True)
        except Exception as error:  # one budget that fails must not cost the figures of the others
            yield MemfitPoint(fraction=fraction, reason=f"{type(error).__name__}: {first_line(error)[:300]}")


def compiled_points(subject: Subject, limits: Limits) -> Iterator[PeerPoint]:
    """Memfit with compiled kernels: plans at budgets, and the smallest."""
    eager = eager_run(subject, with_time=False)
    planned = copy.deepcopy(subject.model)
    comparison = _Comparison(subject)
    usual = QUICK_COMPILED_FRACTIONS if limits.quick else COMPILED_FRACTIONS
    for fraction in (*usual, *(each for each in limits.also if each not in usual), None):
        budget = "smallest" if fraction is None else eager.budget_bytes(fraction)
        setting = "smallest" if fraction is None else f"{fraction:.2f} of the part"
        try:
            yield _compiled_point(subject, planned, budget, setting, limits, comparison)
        except Exception as error:  # one budget that fails must not cost the figures of the others
            yield PeerPoint(peer=COMPILED, setting=setting, reason=f"{type(error).__name__}: {first_line(error)[:300]}")


def _compiled_point(
    subject: Subject,
    planned: nn.Module,
    budget: int | str,
    setting: str,
    limits: Limits,
    comparison: "_Comparison",
) -> PeerPoint:
    start = time.perf_counter()
    options = {} if subject.case.outputs is None else {"outputs": subject.case.outputs}
    sample = subject.case.sample(subject.batch)
    _planner.fit(planned, sample, budget, time_limit=limits.plan_s, kernels="inductor", **options)
    try:
        plan = _planner.plan_of(planned)
        subject.step(planned)
        first_step_s = time.perf_counter() - start
        times = interleaved(subject, planned, pairs=PAIRS, seconds=limits.pairs_s)
        return PeerPoint(
            peer=COMPILED,
            setting=setting,
            budget_bytes=plan.peak_bytes if isinstance(budget, str) else budget,
            peak_bytes=peak_bytes(subject, planned),
            time_ratio=times.ratio,
            error=times.error,
            first_step_s=first_step_s,
            largest_difference=comparison.differences(planned)["gradients"],
            eager_kernels="inductor" not in plan.allow,
        )
    finally:
        _planner.remove(planned)


def _plan(subject: Subject, planned: nn.Module, budget: int | str, limits: Limits, **options: Any) -> Any:
    case = subject.case
    if case.outputs is not None:
        options["outputs"] = case.outputs
    return _planner.plan(planned, case.sample(subject.batch), budget=budget, time_limit=limits.plan_s, **options)


def _measured(
    plan: Any, budget: int | str, planned: nn.Module, subject: Subject, comparison: "_Comparison", pairs_s: float
) -> Measured:
    _planner.apply(plan, planned)
    try:
        differences = comparison.differences(planned)
        times = interleaved(subject, planned, pairs=PAIRS, seconds=pairs_s)
        return Measured(
            budget_bytes=plan.peak_bytes if isinstance(budget, str) else budget,
            predicted_bytes=plan.peak_bytes,
            measured_bytes=peak_bytes(subject, planned),
            predicted_slowdown=plan.slowdown,
            measured_slowdown=times.ratio - 1,
            measured_error=times.error,
            lower_bound=plan.lower_bound,
            gap=plan.gap,
            plan_s=plan.plan_seconds,
            differing=[name for name, difference in differences.items() if difference],
            largest_difference=max(differences.values()),
        )
    finally:
        _planner.remove(planned)


class _Comparison:
    """Two eager steps from a fixed seed, to hold planned ones against."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._buffers = [buffer.clone() for buffer in subject.model.buffers()]
        self._eager = self._two_steps(subject.model)

    def differences(self, planned: nn.Module) -> dict[str, float]:
        """The relative difference of each kind; 0.0 where all is equal bit for bit."""
        found = self._two_steps(planned)
        return {name: relative_difference(expected, found[name]) for name, expected in self._eager.items()}

    def _two_steps(self, model: nn.Module) -> dict[str, list[torch.Tensor | None]]:
        """Two, so that accumulating into existing gradients is compared as well."""
        with torch.no_grad():
            for buffer, start in zip(model.buffers(), self._buffers, strict=True):
                buffer.copy_(start)
        model.zero_grad()
        torch.manual_seed(1)
        losses: list[torch.Tensor | None] = []
        for _ in range(2):
            loss = self._subject.case.loss(model, self._subject.batch)
            loss.backward()
            losses.append(loss.detach())
        gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return {
            "loss": losses,
            "gradients": gradients,
            "buffers": [buffer.clone() for buffer in model.buffers()],
            "generator": [torch.get_rng_state()],
        }


def relative_difference(ones: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> float:
    """How far apart two lists of tensors are, each taken as one long vector; 0.0 only if they are equal.

    Not tensor by tensor: some gradients are zero but for rounding (a bias before BatchNorm, the bias of
    attention's keys), and relative to themselves they differ as soon as anything is rounded differently.

    >>> relative_difference([torch.tensor([3.0, 4.0]), torch.zeros(1)], [torch.tensor([3.0, 4.0]), torch.ones(1)])
    0.2
    """
    if len(ones) != len(others):
        return math.inf
    squares = difference = 0.0
    for one, other in zip(ones, others, strict=True):
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            difference += 0.0 if one is other else math.inf
        elif one.is_floating_point():
            squares += float(one.double().square().sum())
            difference += float((one.double() - other.double()).square().sum())
        elif not torch.equal(one, other):
            difference = math.inf
    if not difference:
        return 0.0
    return math.sqrt(difference / squares) if squares and math.isfinite(difference) else math.inf
