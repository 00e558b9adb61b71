"""Fit models inside a step that somebody else runs.

Note [Measured and tightened]
    What a framework does around a model (its loss, the models beside it) is not captured and cannot be simulated. So
    its own step is rehearsed, forward and backward without the update, and measured. If it is over the budget, every
    model is planned again with so much less as it takes to make up for that, the more the more activations it has.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memfit import api
from memfit.capture.rehearse import drop_gradients, nothing_remains
from memfit.capture.sample import Sample
from memfit.errors import InfeasibleBudget, InvalidModel
from memfit.execute.attach import check_unplanned, remove
from memfit.ir import OptimizerMemory
from memfit.measure.optimizer import OptimizerLike, optimizer_memory
from memfit.measure.peak import held_bytes, measure_peak
from memfit.plan.plan import Plan
from memfit.recipe import EXACT, Budget, Recipe, budget_bytes, check_budget
from memfit.step.random_state import random_state, set_random_state
from memfit.units import format_bytes

_ATTEMPTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a user asks of a plan, whatever runs the step."""

    budget: Budget
    allow: tuple[str, ...] = EXACT
    outputs: str = "all"
    time_limit_s: float = 2.5

    def __post_init__(self) -> None:
        check_budget(self.budget)

    def recipe(self, *, optimizer: OptimizerLike | None, beside_bytes: int) -> Recipe:
        return Recipe(
            budget=self.budget,
            allow=self.allow,
            outputs=self.outputs,
            time_limit_s=self.time_limit_s,
            optimizer=optimizer,
            beside_bytes=beside_bytes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A model that a step calls, and what it calls it with."""

    model: nn.Module
    sample: Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """What was found for a step that somebody else runs."""

    plans: tuple[Plan, ...]
    budget_bytes: int
    predicted_peak_bytes: int

    @property
    def slowdown(self) -> float:
        """Predicted, as a part of the time that the planned models take in the eager step."""
        return sum(plan.extra_us for plan in self.plans) / max(1e-9, sum(plan.step_us for plan in self.plans))

    def scalars(self) -> dict[str, float]:
        """Numbers for a logger, by name."""
        return {
            "memfit/budget_bytes": float(self.budget_bytes),
            "memfit/predicted_peak_bytes": float(self.predicted_peak_bytes),
            "memfit/predicted_slowdown": self.slowdown,
        }

    def __str__(self) -> str:
        return (
            f"budget {format_bytes(self.budget_bytes)}, predicted peak {format_bytes(self.predicted_peak_bytes)}, "
            f"{self.slowdown:+.1%} time"
        )


def fit_model(part: Part, wishes: Wishes, *, optimizer: OptimizerLike | None, beside_bytes: int) -> Fitted:
    """Fit a model whose forward is all of the step that keeps anything."""
    check_trainable(part.model)
    api.fit_by(wishes.recipe(optimizer=optimizer, beside_bytes=beside_bytes), part.model, part.sample)
    plan = api.plan_of(part.model)
    assert plan is not None
    limit = plan.peak_bytes if plan.budget_bytes is None else plan.budget_bytes
    return Fitted(plans=(plan,), budget_bytes=limit, predicted_peak_bytes=plan.peak_bytes)


def check_trainable(model: nn.Module) -> None:
    """Refuse what cannot be fitted before anything is run."""
    check_unplanned(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidModel(f"{type(model).__name__} has no parameter that requires a gradient, so nothing is trained")


class RehearsedStep:
    """Forward and backward as a framework runs them, on one batch, leaving nothing behind."""

    def __init__(
        self,
        root: nn.Module,
        run: Callable[[], None],
        batch: Any,
        *,
        optimizer: OptimizerMemory,
        beside_bytes: int,
        held: Sequence[Any] = (),
    ) -> None:
        """`held` has what a run leaves to the next one, as loops hold the last loss until the next is there."""
        self.root = root
        self._held = held
        self._run = run
        self._batch = batch
        self._optimizer = optimizer
        self._beside_bytes = beside_bytes

    def rehearse(self) -> None:
        """Run it once."""
        with nothing_remains(self.root, Sample()), generators_put_back(), torch.enable_grad():
            self._run()

    def peak_bytes(self) -> int:
        """Of the whole step, the optimizer's part of it as it is known beforehand."""
        nothing = Sample()
        with nothing_remains(self.root, nothing), generators_put_back(), torch.enable_grad():
            self._run()  # what is captured, is captured here
            drop_gradients(self.root, nothing)
            last_bytes = held_bytes(self._held)  # not handed to the measurement, which would hold it to the end
            measured = measure_peak(self._run, resident=[self.root, self._batch])
        held = [self.root, self._batch, *self._held]
        end_bytes = self.beside_bytes + held_bytes(held) + gradient_bytes(self.root)
        return max(measured.peak_bytes + last_bytes + self.beside_bytes, end_bytes + self._optimizer.workspace_bytes)

    @property
    def beside_bytes(self) -> int:
        return self._optimizer.state_bytes + self._beside_bytes

    def beside(self, part: nn.Module) -> int:
        """What lives all along and is not of one part of the root."""
        whole_bytes = held_bytes([self.root]) + gradient_bytes(self.root)
        return self.beside_bytes + whole_bytes - held_bytes([part]) - gradient_bytes(part)


def fit_parts(parts: Sequence[Part], step: RehearsedStep, wishes: Wishes) -> Fitted:
    """Fit the models of a step so that all of it is within the budget, see Note [Measured and tightened]."""
    for part in parts:
        check_trainable(part.model)
    smallest = wishes.budget == "smallest"
    limit = 0 if smallest else _limit(wishes.budget, step)
    less = [0] * len(parts)
    lowest: int | None = None
    for _ in range(_ATTEMPTS):
        try:
            plans = [_fit_part(part, step, wishes, limit, less[n]) for n, part in enumerate(parts)]
            peak = step.peak_bytes()
        except InfeasibleBudget as error:
            _remove(parts)
            raise _infeasible(limit, lowest, error) from error
        except BaseException:  # an interrupt too: nothing is left running by a plan that was not proven
            _remove(parts)
            raise
        if peak <= limit or smallest:
            return Fitted(plans=tuple(plans), budget_bytes=limit or peak, predicted_peak_bytes=peak)
        lowest = peak if lowest is None else min(peak, lowest)
        shares = [max(1, plan.unplanned_peak_bytes - plan.persistent_bytes) for plan in plans]
        for n, plan in enumerate(plans):
            room_bytes = limit - plan.peak_bytes
            less[n] += room_bytes + (peak - limit) * shares[n] // sum(shares) + 1
        _remove(parts)
    raise _infeasible(limit, lowest, None)


def _fit_part(part: Part, step: RehearsedStep, wishes: Wishes, limit: int, less_bytes: int) -> Plan:
    asked = wishes if wishes.budget == "smallest" else dataclasses.replace(wishes, budget=limit)
    recipe = asked.recipe(optimizer=None, beside_bytes=step.beside(part.model) + less_bytes)
    api.fit_by(recipe, part.model, part.sample)
    plan = api.plan_of(part.model)
    assert plan is not None
    return plan


def _limit(budget: Budget, step: RehearsedStep) -> int:
    """A budget in bytes; a fraction is one of the measured peak of the eager step."""
    is_fraction = isinstance(budget, float) and budget <= 1
    return budget_bytes(budget, step.peak_bytes() if is_fraction else 0)


def _remove(parts: Sequence[Part]) -> None:
    for part in parts:
        remove(part.model)


def _infeasible(limit: int, lowest: int | None, error: InfeasibleBudget | None) -> InfeasibleBudget:
    found = "" if lowest is None else f"; the lowest measured peak of the whole step was {format_bytes(lowest)}"
    reason = "" if error is None else f": {error}"
    return InfeasibleBudget(
        f"the step could not be brought to {format_bytes(limit)}{found}{reason}",
        smallest_bytes=lowest or (0 if error is None else error.smallest_bytes),
        floor_bytes=0 if error is None else error.floor_bytes,
        operation="" if error is None else error.operation,
    )


def gradient_bytes(model: nn.Module) -> int:
    """What the gradients of all trained parameters take."""
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def memory_of(optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerMemory:
    """Of several optimizers, which step one after the other."""
    each = [optimizer_memory(optimizer, []) for optimizer in optimizers]
    return OptimizerMemory(
        state_bytes=sum(memory.state_bytes for memory in each),
        workspace_bytes=max((memory.workspace_bytes for memory in each), default=0),
    )


@contextlib.contextmanager
def generators_put_back() -> Iterator[None]:
    """Draw from any generator without a trace: the run that follows draws what it would have drawn."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
