"""An optimizer with two parameters of its own, which updates are run on to see what they take.

Note [Cold]
    In a step all that an update reads comes from memory, for a whole pass lies between two of them. A stand-in would be
    found in the processor's cache, so that is filled with something else before each time it is measured. What
    a call takes by itself is measured warm, as the calls for one parameter after the other are.
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.accelerator import synchronize
from memfit.measure.peak import MeasuredPeak, measure_peak
from memfit.optimizer_twin import empty_twin
from memfit.step.parts import MemoryHome, PartUpdates
from memfit.step.policy import StepPolicy
from memfit.step.rounding import StochasticRounding
from memfit.step.stand_in_size import StandInSize, group_of
from memfit.step.updater import make_tier
from memfit.tensors import storage_bytes, tensors_in

_REPEATS = 8
_CACHE_BYTES = 2**27  # more than most caches hold


class StandIn:
    """An optimizer like the given one with two parameters of its own: one is read ahead while the other is updated."""

    def __init__(
        self,
        optimizer: Optimizer,
        policy: StepPolicy,
        size: StandInSize,
        *,
        room_bytes: int | None = None,  # that is left of a budget
    ) -> None:
        left_bytes = _CACHE_BYTES if room_bytes is None else room_bytes - size.needed_bytes
        self._cache_bytes = max(0, min(_CACHE_BYTES, left_bytes))
        self._scale = size.scale
        self.parameters = [
            _parameter_like(each, shape) for each, shape in zip(size.originals, size.shapes, strict=True)
        ]
        self.elements = sum(each.numel() for each in self.parameters)
        self._device = self.parameters[0].device
        self._optimizer = empty_twin(optimizer)
        self._optimizer.param_groups = [
            {**group_of(original, optimizer), "params": [parameter]}
            for original, parameter in zip(size.originals, self.parameters, strict=True)
        ]
        self._states = make_tier(policy, self._device)
        self._in_parts = self._part_updates(policy) if policy.is_updated_in_parts else None

    def __enter__(self) -> "StandIn":
        self.update()  # makes the state
        return self

    def __exit__(self, *_: Any) -> None:
        if self._states is not None:
            self._states.settle()
            self._states.tier.close()

    def update(self) -> None:
        if self._in_parts is None:
            self._optimizer.step()
        else:
            for parameter, following in zip(self.parameters, [*self.parameters[1:], None], strict=True):
                self._in_parts.update(parameter, following)
        if self._states is not None:
            self._states.settle()

    def time_us(self, *, cold: bool = False) -> float:
        """Return what a quarter of several stay below: others on the machine make some slower and none faster."""
        others = torch.zeros(self._cache_bytes if cold else 0, dtype=torch.uint8, device=self._device)
        times = []
        for _ in range(_REPEATS):
            others.add_(1)  # see Note [Cold]
            self._wait()
            start = time.perf_counter()
            self.update()
            self._wait()
            times.append(time.perf_counter() - start)
        return sorted(times)[_REPEATS // 4] * 1e6

    def workspace_bytes(self) -> int:
        """Return what an update of the originals allocates, as far as that can be told from smaller ones."""
        peaks = [self._measured(self.update)]
        self.parameters.reverse()  # a backward pass has an order of its own
        peaks.append(self._measured(self.update))
        return int(self._scale * max(peak.peak_bytes - peak.resident_bytes for peak in peaks))

    def carried_bytes(self) -> int:
        if self._in_parts is None or self._states is None or len(self.parameters) == 1:
            return 0
        live_bytes = []
        for parameter, following in itertools.permutations(self.parameters, 2):
            one = functools.partial(self._in_parts.update, parameter, following)
            peak = self._measured(one)
            live_bytes.append(peak.live_bytes[-1] - peak.resident_bytes)
            self._states.settle()
        return int(self._scale * max(0, *live_bytes))

    def counter_bytes(self) -> int:
        """State that stays in memory when the rest is in a tier."""
        state = tensors_in(list(self._optimizer.state.values()))
        return storage_bytes([each for each in state if not each.dim()])

    def _measured(self, run: Callable[[], None]) -> MeasuredPeak:
        gradients = [parameter.grad for parameter in self.parameters]
        return measure_peak(run, resident=[self.parameters, gradients, self._optimizer])

    def _wait(self) -> None:
        synchronize(self._device)

    def _part_updates(self, policy: StepPolicy) -> PartUpdates:
        rounding = StochasticRounding(self._device, 0) if policy.precision == "pure-bf16" else None
        home_of = MemoryHome if self._states is None else self._states.home_of
        return PartUpdates(self._optimizer, home_of=home_of, rounding=rounding)


def _parameter_like(original: nn.Parameter, shape: torch.Size) -> nn.Parameter:
    parameter = nn.Parameter(torch.full(shape, 0.5, dtype=original.dtype, device=original.device))
    parameter.grad = torch.full_like(parameter, 1e-3)
    return parameter
