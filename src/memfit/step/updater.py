"""Changes parameters from their gradients, by the techniques a policy names."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.errors import InvalidInput
from memfit.measure.optimizer import optimizer_memory
from memfit.step.disk_tier import DiskTier
from memfit.step.host_tier import HostTier
from memfit.step.inside import InsideBackward, accumulating, check_gradients_stay_here
from memfit.step.optimizers import check_in_parts, check_movable, check_without_hooks
from memfit.step.parts import MemoryHome, PartUpdates
from memfit.step.policy import StepPolicy
from memfit.step.rounding import StochasticRounding
from memfit.step.tiers import TieredState


class Updater:
    """The optimizer and where its state is; runs it at once, parameter by parameter, or inside the backward pass."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        policy: StepPolicy,
        device: torch.device,
        seed: int,
        states: TieredState | None = None,  # where the state lives instead of where the policy says
    ) -> None:
        self._optimizer = optimizer
        self._technique = _technique(policy)
        self._model = model
        self.rounding = StochasticRounding(device, seed) if policy.precision == "pure-bf16" else None
        self._in_parts: PartUpdates | None = None
        self._inside: InsideBackward | None = None
        check_updates(model, optimizer, policy)
        self._states = states or make_tier(policy, device)
        if policy.is_updated_in_parts:
            home_of = MemoryHome if self._states is None else self._states.home_of
            self._in_parts = PartUpdates(optimizer, home_of=home_of, rounding=self.rounding)
        if policy.update == "inside" and self._in_parts:
            self._inside = InsideBackward(model, self._in_parts.update)

    def allocate(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the room for the state before the first update, so that a full disk changes nothing."""
        if self._states is None or not isinstance(self._states.tier, DiskTier):
            return
        with contextlib.suppress(InvalidInput):  # an optimizer that cannot be asked; it takes what it needs as it goes
            self._states.tier.allocate(optimizer_memory(self._optimizer, parameters).state_bytes)

    def around_backward(
        self, loss: torch.Tensor, parameters: Sequence[nn.Parameter], *, is_last: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """What a backward pass from `loss` runs in, the last one before an update or an earlier one."""
        if self._in_parts is not None:
            check_without_hooks(self._optimizer, self._technique)
        if self._inside is not None and is_last:
            return self._inside.updating(loss, parameters)
        return accumulating(self._model, loss, parameters)

    def apply(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update all parameters that have a gradient."""
        if self._in_parts is None:
            self._optimizer.step()
            return
        waiting = [parameter for parameter in parameters if parameter.grad is not None]
        for parameter, following in zip(waiting, [*waiting[1:], None], strict=False):
            self._in_parts.update(parameter, following)
        self.settle()

    def settle(self) -> None:
        """Until all state is where it belongs."""
        if self._states is not None:
            self._states.settle()

    def adopt(self, parameter: nn.Parameter) -> None:
        """Bring state that was loaded to where it belongs."""
        if self._states is not None:
            self._states.home_of(parameter, self._optimizer.state[parameter])

    def close(self) -> None:
        """Give up what lies in a tier; the optimizer's state is then gone."""
        if self._states is not None:
            self._states.settle()
            self._optimizer.state.clear()
            self._states.tier.close()


def check_updates(model: nn.Module, optimizer: Optimizer, policy: StepPolicy) -> None:
    """Refuse a way to update that would give other numbers, or that the state cannot go."""
    if policy.is_updated_in_parts:
        check_in_parts(optimizer, _technique(policy), policy.allow)
    if policy.state_tier:
        check_movable(optimizer)
    if policy.update == "inside":
        check_gradients_stay_here(model)


def make_tier(policy: StepPolicy, device: torch.device) -> TieredState | None:
    """Where the optimizer's state lives, if not beside the parameters."""
    if policy.state_tier == "host":
        if device.type == "cpu":
            raise InvalidInput(
                'state_tier="host" was given for parameters that are in host memory already; the next tier is '
                'state_tier="disk" with a directory'
            )
        return TieredState(HostTier(device))
    return None if policy.directory is None else TieredState(DiskTier(policy.directory))


def _technique(policy: StepPolicy) -> str:
    if policy.update == "inside":
        return 'update="inside"'
    return f'state_tier="{policy.state_tier}"' if policy.state_tier else 'precision="pure-bf16"'
