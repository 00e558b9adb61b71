"""A loss that is captured with its model and run by a plan.

Batches that are dataclasses go through the capture as dicts of their fields, for captured calls know no dataclasses.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from memfit.capture.with_loss import WithLoss
from memfit.execute.attach import attach
from memfit.plan.plan import Plan
from memfit.recipe import Recipe
from memfit.runner import Runner
from memfit.step.loss_numbers import check_unchanged, numbers_read_by
from memfit.step.losses import Loss


class CapturedLoss:
    """`loss(model, batch)` by a plan; what the plan was not made for is planned under the same budget."""

    def __init__(self, subject: WithLoss, loss: Loss, plan: Plan) -> None:
        self.subject = subject
        self._loss = loss
        self._numbers = numbers_read_by(loss)
        recipe = Recipe(budget=plan.budget_bytes, allow=plan.allow)
        attach(subject, Runner(recipe=recipe, plan=plan, minds_kept_gradients=False))  # a step's choice counts them

    def __call__(self, batch: Any) -> Any:
        check_unchanged(self._loss, self._numbers)
        self.subject.training = self.subject.model.training
        return self.subject(fields_of(batch))


def with_loss(model: nn.Module, loss: Loss, batch: Any) -> WithLoss:
    """Model and loss as one module, which takes `fields_of` batches like this one."""
    if not _is_dataclass(batch):
        return WithLoss(model, loss)
    kind = type(batch)
    return WithLoss(model, lambda model, fields: loss(model, kind(**fields)))


def fields_of(batch: Any) -> Any:
    """A batch as a captured call takes it."""
    if not _is_dataclass(batch):
        return batch
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}


def _is_dataclass(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type | Mapping)
