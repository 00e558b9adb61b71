"""Updates inside the backward pass: a gradient is used and dropped as soon as it is complete.

Note [Inside]
    Autograd adds up all contributions to a parameter's gradient before it accumulates it, also those of a tied
    weight, and calls a hook when that is done. By then every operation that has a say in the gradient has read the
    parameter for the last time; one that reads it without (through `detach()`) finds it changed, which autograd
    reports. With several micro-batches the gradients of all but the last are live until then, so the update is
    exact but saves little. Captured calls hand their gradients over, see Note [Handing over] in `execute/handover.py`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from memfit import _torch
from memfit.errors import InvalidInput
from memfit.execute.attach import is_planned
from memfit.execute.handover import taking

Update = Callable[[nn.Parameter, nn.Parameter | None], None]  # a parameter, and the one expected next


class InsideBackward:
    """Runs `update` on every parameter during one backward pass."""

    def __init__(self, model: nn.Module, update: Update) -> None:
        self._model = model
        self._update = update
        self._order: list[nn.Parameter] = []
        self._next: dict[nn.Parameter, nn.Parameter] = {}  # as in the last pass

    @contextlib.contextmanager
    def updating(self, loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Update what gets its gradient meanwhile; what has one already and gets no more is updated at the end."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._order.clear()
        with contextlib.ExitStack() as stack:
            # Captured calls first: they leave alone what has hooks.
            if has_captured_calls(self._model):
                stack.enter_context(taking(loss, trained, self._take))
            for parameter in trained:
                stack.callback(parameter.register_post_accumulate_grad_hook(self.consume).remove)
            yield
        for parameter in parameters:
            if parameter.grad is not None:
                self.consume(parameter)
        self._next = dict(zip(self._order, self._order[1:], strict=False))

    def consume(self, parameter: torch.Tensor) -> None:
        """Update a parameter whose gradient is complete, and drop the gradient."""
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:  # autograd calls hooks also where nothing arrived
            return
        self._update(parameter, self._next.get(parameter))
        parameter.grad = None
        self._order.append(parameter)

    def _take(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self.consume(parameter)
        return True


@contextlib.contextmanager
def accumulating(model: nn.Module, loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let captured calls add to gradients that exist one by one, as plain autograd does."""
    existing = [parameter for parameter in parameters if parameter.grad is not None]
    if not existing or _adds_up_elsewhere(model) or not has_captured_calls(model):
        yield
        return

    def take(parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
        return parameter.grad is not None

    with taking(loss, existing, take):
        yield


def has_captured_calls(model: nn.Module) -> bool:
    """Whether a model or a part of it runs through memfit."""
    return any(is_planned(module) for module in model.modules())


def is_distributed(model: nn.Module) -> bool:
    """Whether gradients are not complete when they are accumulated, but added up over processes."""
    sharded = any(not _torch.is_plain(parameter.data) for parameter in model.parameters())
    return isinstance(model, nn.parallel.DistributedDataParallel) or sharded


def _adds_up_elsewhere(model: nn.Module) -> bool:
    """Whether gradients go to other processes in the next backward pass."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.require_backward_grad_sync  # not under `no_sync`
    return is_distributed(model)


def check_gradients_stay_here(model: nn.Module) -> None:
    """Refuse models whose gradients are not complete when they are accumulated."""
    if is_distributed(model):
        raise InvalidInput(
            'update="inside" would use gradients before they are added up over all processes; use update="after" with '
            f"a {type(model).__name__} that is distributed"
        )
