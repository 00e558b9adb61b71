"""A model and its loss: as one module that is captured, or the call of the model that a loss makes."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memfit.accelerator import accelerators_of, generators_kept
from memfit.capture.autocast import Autocast, autocast_as, autocast_state
from memfit.capture.sample import Sample
from memfit.capture.state import draws_put_back
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


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """A call of the model: its arguments, and what autocast does there, see Note [Autocast of the call]."""

    sample: Sample
    autocast: Autocast = dataclasses.field(default_factory=autocast_state)
    caches_casts: bool = dataclasses.field(default_factory=torch.is_autocast_cache_enabled)

    def modes(self) -> contextlib.AbstractContextManager[None]:
        """Return what makes autocast as it is at the call."""
        return autocast_as(self.autocast, cached=self.caches_casts)


class _Called(BaseException):
    """Ends a loss where it calls the model; no handler of the loss's own for errors takes it for one."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = ModelCall(Sample(args, kwargs))


def with_modes_of_now(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a loss that runs under the autocast of here and now, wherever it is called."""
    here = ModelCall(Sample())

    @functools.wraps(loss)
    def run(model: Any, batch: Any) -> Any:
        with here.modes():
            return loss(model, batch)

    return run


@contextlib.contextmanager
def loss_draws_put_back(model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any) -> Iterator[None]:
    """Put back the generators that a loss draws from, and the model behind it."""
    devices = accelerators_of([*model.parameters(), *model.buffers()])
    with generators_kept(devices), draws_put_back(WithLoss(model, loss), Sample((batch,))):
        yield


def call_of_model(model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any) -> ModelCall:
    """Find the arguments that a loss calls the model with; the model is not run."""

    def end(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Called(args, kwargs)

    hook = model.register_forward_pre_hook(end, with_kwargs=True, prepend=True)
    try:
        with loss_draws_put_back(model, loss, batch):
            loss(model, batch)
    except _Called as called:
        return called.call
    finally:
        hook.remove()
    raise InvalidInput(
        f"the loss does not call the {type(model).__name__} it is given; give a function loss(model, sample) that "
        "calls the model and returns a scalar"
    )
