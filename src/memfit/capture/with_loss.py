"""A model and its loss: as one module that is captured, or the call of the model that a loss makes."""

from collections.abc import Callable
from typing import Any

from torch import nn

from memfit.capture.sample import Sample
from memfit.errors import InvalidInput


class WithLoss(nn.Module):
    """Computes `loss(model, batch)`."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self.training = model.training

    def forward(self, batch: Any) -> Any:
        return self._loss(self.model, batch)


class _Called(BaseException):
    """Ends a loss where it calls the model; no handler of the loss's own for errors takes it for one."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.sample = Sample(args, kwargs)


def call_of_model(model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any) -> Sample:
    """Find the arguments that a loss calls the model with; the model is not run."""

    def end(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Called(args, kwargs)

    hook = model.register_forward_pre_hook(end, with_kwargs=True, prepend=True)
    try:
        loss(model, batch)
    except _Called as called:
        return called.sample
    finally:
        hook.remove()
    raise InvalidInput(
        f"the loss does not call the {type(model).__name__} it is given; give a function loss(model, sample) that "
        "calls the model and returns a scalar"
    )
