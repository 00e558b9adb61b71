"""What an update of all parameters takes, in bytes and time, by each way there is to do it.

The optimizer's own step is asked without memory (`measure/optimizer.py`). Updates in parts are run for real, on a
stand-in as big as a few parts: their memory does not depend on how big parameters are, and their time is
that of an element and that of a call.
"""

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.measure.optimizer import optimizer_memory
from memfit.measure.peak import measure_peak
from memfit.step import parts
from memfit.step.optimizers import is_elementwise, parameters_of
from memfit.step.parts import MemoryHome, PartUpdates, without_parameters
from memfit.step.policy import StepPolicy
from memfit.step.rounding import StochasticRounding
from memfit.step.updater import make_tier
from memfit.tensors import storage_bytes, tensors_in

_PARTS = 4  # of a stand-in: one is read ahead and one is written back while two are worked on
_REPEATS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """Of all parameters once."""

    state_bytes: int  # of the optimizer, in memory
    workspace_bytes: int  # while it runs
    time_us: float


def update_cost(optimizer: Optimizer, policy: StepPolicy) -> UpdateCost:
    """Measure an update as a policy wants it. Neither the optimizer nor its parameters change."""
    trained = [each for each in parameters_of(optimizer) if each.requires_grad]
    largest = max(trained, key=lambda each: each.numel())
    memory = optimizer_memory(optimizer, trained, for_cuda=largest.is_cuda)
    with (
        _StandIn(optimizer, policy, largest, whole=True) as big,
        _StandIn(optimizer, policy, largest) as one,
    ):
        call_us, big_us = one.time_us(), big.time_us()
        elements = sum(each.numel() for each in trained)
        time_us = len(trained) * call_us + elements / big.elements * max(0.0, big_us - call_us)
        if not policy.is_updated_in_parts:
            return UpdateCost(state_bytes=memory.state_bytes, workspace_bytes=memory.workspace_bytes, time_us=time_us)
        state_bytes = memory.state_bytes if policy.state_tier is None else len(trained) * one.counter_bytes()
        return UpdateCost(state_bytes=state_bytes, workspace_bytes=big.workspace_bytes(), time_us=time_us)


class _StandIn:
    """An optimizer like the given one with one parameter of its own."""

    def __init__(self, optimizer: Optimizer, policy: StepPolicy, largest: nn.Parameter, *, whole: bool = False) -> None:
        self.parameter = _parameter_like(largest, optimizer, whole=whole)
        self.elements = self.parameter.numel()
        self._optimizer = without_parameters(optimizer)
        self._optimizer._optimizer_step_pre_hooks = OrderedDict()  # the user's are not for this
        self._optimizer._optimizer_step_post_hooks = OrderedDict()
        group = next(each for each in optimizer.param_groups if any(one is largest for one in each["params"]))
        self._optimizer.param_groups = [{**group, "params": [self.parameter]}]
        self._states = make_tier(policy, largest.device)
        self._run = self._optimizer.step if not policy.is_updated_in_parts else self._in_parts(policy)

    def __enter__(self) -> "_StandIn":
        self.update()  # makes the state
        return self

    def __exit__(self, *_: Any) -> None:
        if self._states is not None:
            self._states.settle()
            self._states.tier.close()

    def update(self) -> None:
        self._run()
        if self._states is not None:
            self._states.settle()

    def time_us(self) -> float:
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            self.update()
            times.append(time.perf_counter() - start)
        return min(times) * 1e6

    def workspace_bytes(self) -> int:
        state = [] if self._states is not None else tensors_in(list(self._optimizer.state.values()))
        measured = measure_peak(self.update, resident=[self.parameter, self.parameter.grad, state])
        return measured.peak_bytes - measured.resident_bytes

    def counter_bytes(self) -> int:
        """State that stays in memory when the rest is in a tier."""
        state = tensors_in(list(self._optimizer.state.values()))
        return storage_bytes([each for each in state if not each.dim()])

    def _in_parts(self, policy: StepPolicy) -> Callable[[], None]:
        rounding = StochasticRounding(self.parameter.device, 0) if policy.precision == "pure-bf16" else None
        home_of = MemoryHome if self._states is None else self._states.home_of
        updates = PartUpdates(self._optimizer, home_of=home_of, rounding=rounding)
        return lambda: updates.update(self.parameter)


def _parameter_like(largest: nn.Parameter, optimizer: Optimizer, *, whole: bool) -> nn.Parameter:
    """As big as matters: a few parts where the optimizer is run on parts, else all of it; or as small as can be."""
    shape = largest.shape if whole else torch.Size([1] * largest.dim())
    if whole and is_elementwise(optimizer):
        shape = torch.Size([min(largest.numel(), _PARTS * parts.LARGEST_PART)])
    parameter = nn.Parameter(torch.full(shape, 0.5, dtype=largest.dtype, device=largest.device))
    parameter.grad = torch.full_like(parameter, 1e-3)
    return parameter
