"""A model and its loss as one module, so that the loss is part of what is captured."""

from collections.abc import Callable
from typing import Any

from torch import nn


class WithLoss(nn.Module):
    """Computes `loss(model, batch)`."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self.training = model.training

    def forward(self, batch: Any) -> Any:
        return self._loss(self.model, batch)
