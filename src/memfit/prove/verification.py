"""Compare a step of a fitted model with the eager one now and then, while it trains."""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memfit.api import plan_of
from memfit.capture.sample import Sample, without_graph
from memfit.errors import ExecutionError, InvalidInput
from memfit.execute.attach import planned_forwards, put_back, removed
from memfit.plan.plan import Plan
from memfit.prove.check import Check, tolerated
from memfit.prove.comparison import PARTS, Comparison, StoredResult, compared
from memfit.prove.eager import EagerComparison


def verify_every(model: nn.Module, steps: int = 100) -> nn.Module:
    """Compare every so many training calls of a fitted model with the eager step, on the batch that is there.

    Outputs, gradients, buffers and the generator are compared as `check` does it, inside the budget; the model, its
    gradients and the generators are left as they are, and the call then runs as always. A difference raises
    `ExecutionError` with what differs. `memfit.remove(model)` ends it. The same model is returned.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidInput(f"steps is a number of calls from 1 on, {steps!r} was given")
    plan = plan_of(model)
    if plan is None:
        raise InvalidInput(f"this {type(model).__name__} does not run by a plan; call memfit.fit with a budget first")
    verification = _Verification(plan, steps)
    verification.handle = model.register_forward_pre_hook(verification, with_kwargs=True)
    return model


class _Verification:
    """Counts the training calls of a model, and compares some; takes itself away when the plan is gone."""

    def __init__(self, plan: Plan, steps: int) -> None:
        self._plan, self._steps = plan, steps
        self._calls = 0
        self._is_running = False
        self.handle: RemovableHandle | None = None

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_running or not model.training or not torch.is_grad_enabled():
            return
        if plan_of(model) is not self._plan:
            if self.handle is not None:
                self.handle.remove()
            return
        self._calls += 1
        if (self._calls - 1) % self._steps:
            return
        self._is_running = True
        try:
            found = self._compared(model, without_graph(Sample(args, kwargs)))
        finally:
            self._is_running = False
        if not found.passed:
            raise ExecutionError(f"call {self._calls} of the {type(model).__name__} is not what eager makes: {found}")

    def _compared(self, model: nn.Module, example: Sample) -> Check:
        comparison = _AsFitted(model, self._plan, example)
        comparisons, how = comparison.run()
        tolerance = tolerated(self._plan)
        return Check(model=type(model).__name__, seed=0, tolerance=tolerance, comparisons=comparisons, how=how)


class _AsFitted(EagerComparison):
    """Compares the calls that a fitted model has captured, not new ones by the same plan."""

    def __init__(self, model: nn.Module, plan: Plan, example: Sample) -> None:
        self._forwards = planned_forwards(model)
        super().__init__(model, plan, example, seed=0)

    def run(self) -> tuple[tuple[Comparison, ...], str]:
        """Compare in the first way that fits."""
        with removed(self._model):
            return super().run()

    def _planned_step(self, file: Any, eager: StoredResult, parts: tuple[str, ...] = PARTS) -> tuple[Comparison, ...]:
        put_back(self._forwards)
        try:
            return self._step(file, self._example, lambda made: compared(eager, made, parts))
        finally:
            for forward in self._forwards:
                forward.restore()
