"""What an update of all parameters takes, in bytes and time, by each way there is to do it.

The optimizer's own step is asked without memory (`measure/optimizer.py`). Updates in parts are run for real, on a
stand-in as big as a few parts: their memory does not depend on how big parameters are, and their time is
that of an element and that of a call.

Note [Cold]
    In a step all that an update reads comes from memory, for a whole pass lies between two of them. A stand-in would be
    found in the processor's cache, so that is filled with something else before each time it is measured. What
    a call takes by itself is measured warm, as the calls for one parameter after the other are.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.accelerator import is_accelerator, synchronize
from memfit.measure.optimizer import optimizer_memory
from memfit.measure.peak import MeasuredPeak, measure_peak
from memfit.optimizer_twin import empty_twin
from memfit.step import parts
from memfit.step.optimizers import is_elementwise, is_low_bit, parameters_of
from memfit.step.parts import MemoryHome, PartUpdates
from memfit.step.policy import StepPolicy
from memfit.step.rounding import StochasticRounding
from memfit.step.updater import make_tier
from memfit.tensors import storage_bytes, tensors_in

_PARTS = 4  # of a stand-in: one is read ahead and one is written back while two are worked on
_REPEATS = 8
_CACHE_BYTES = 2**27  # more than most caches hold


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """Of all parameters once."""

    state_bytes: int  # of the optimizer, in memory
    workspace_bytes: int  # while it runs
    time_us: float
    carried_bytes: int = 0  # between the updates of two parameters: what is read ahead and what is written back


def update_cost(optimizer: Optimizer, policy: StepPolicy, room_bytes: int | None = None) -> UpdateCost:
    """Measure an update as a policy wants it. Neither the optimizer nor its parameters change.

    `room_bytes` is what is left of a budget: what fills the cache between two updates takes no more.
    """
    trained = [each for each in parameters_of(optimizer) if each.requires_grad]
    memory = optimizer_memory(optimizer, trained, for_cuda=is_accelerator(trained[0].device))
    elements = sum(each.numel() for each in trained)
    with (
        _StandIn(optimizer, policy, trained, room_bytes=room_bytes) as big,
        _StandIn(optimizer, policy, trained, smallest=True) as small,
    ):
        call_us = small.time_us() / len(small.parameters)
        element_us = max(0.0, big.time_us(cold=True) - call_us * len(big.parameters)) / big.elements
        time_us = len(trained) * call_us + elements * element_us
        if not policy.is_updated_in_parts:
            workspace_bytes = big.workspace_bytes() if is_low_bit(optimizer) else memory.workspace_bytes
            return UpdateCost(state_bytes=memory.state_bytes, workspace_bytes=workspace_bytes, time_us=time_us)
        counter_bytes = len(trained) * small.counter_bytes() // len(small.parameters)
        state_bytes = memory.state_bytes if policy.state_tier is None else counter_bytes
        return UpdateCost(
            state_bytes=state_bytes,
            workspace_bytes=big.workspace_bytes(),
            time_us=time_us,
            carried_bytes=big.carried_bytes(),
        )


class _StandIn:
    """An optimizer like the given one with two parameters of its own: one is read ahead while the other is updated."""

    def __init__(
        self,
        optimizer: Optimizer,
        policy: StepPolicy,
        trained: Sequence[nn.Parameter],
        *,
        smallest: bool = False,
        room_bytes: int | None = None,  # that is left of a budget
    ) -> None:
        self._cache_bytes = _CACHE_BYTES if room_bytes is None else max(0, min(_CACHE_BYTES, room_bytes // 2))
        originals = _largest_neighbours(trained, parts.LARGEST_PART if is_elementwise(optimizer) else None)
        self.parameters = [_parameter_like(each, optimizer, smallest=smallest) for each in originals]
        self.elements = sum(each.numel() for each in self.parameters)
        self._device = originals[0].device
        self._optimizer = empty_twin(optimizer)
        groups = [_group_of(each, optimizer) for each in originals]
        self._optimizer.param_groups = [
            {**group, "params": [parameter]} for group, parameter in zip(groups, self.parameters, strict=True)
        ]
        self._states = make_tier(policy, self._device)
        self._run = self._in_parts(policy) if policy.is_updated_in_parts else self._optimizer.step

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

    def time_us(self, *, cold: bool = False) -> float:
        """What a quarter of several stay below: others on the machine make some slower and none faster."""
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
        peaks = [self._measured(self.update)]
        self.parameters.reverse()  # a backward pass has an order of its own
        peaks.append(self._measured(self.update))
        return max(peak.peak_bytes - peak.resident_bytes for peak in peaks)

    def carried_bytes(self) -> int:
        if self._states is None or len(self.parameters) == 1:
            return 0
        live_bytes = []
        for parameter, following in itertools.permutations(self.parameters, 2):
            one = functools.partial(self._update_one, parameter, following)
            peak = self._measured(one)
            live_bytes.append(peak.live_bytes[-1] - peak.resident_bytes)
            self._states.settle()
        return max(0, *live_bytes)

    def counter_bytes(self) -> int:
        """State that stays in memory when the rest is in a tier."""
        state = tensors_in(list(self._optimizer.state.values()))
        return storage_bytes([each for each in state if not each.dim()])

    def _measured(self, run: Callable[[], None]) -> MeasuredPeak:
        gradients = [parameter.grad for parameter in self.parameters]
        return measure_peak(run, resident=[self.parameters, gradients, self._optimizer])

    def _wait(self) -> None:
        synchronize(self._device)

    def _in_parts(self, policy: StepPolicy) -> Callable[[], None]:
        rounding = StochasticRounding(self._device, 0) if policy.precision == "pure-bf16" else None
        home_of = MemoryHome if self._states is None else self._states.home_of
        self._update_one = PartUpdates(self._optimizer, home_of=home_of, rounding=rounding).update

        def run() -> None:
            for parameter, following in zip(self.parameters, [*self.parameters[1:], None], strict=True):
                self._update_one(parameter, following)

        return run


def _largest_neighbours(trained: Sequence[nn.Parameter], largest_part: int | None) -> list[nn.Parameter]:
    """The parameter and the one after it that together have the largest parts; the largest, without parts."""

    def size(place: int) -> tuple[int, int]:
        counts = [each.numel() for each in trained[place : place + 2]]
        if largest_part is not None:
            return 0, sum(min(count, largest_part) for count in counts)
        return max(counts), sum(counts)

    place = max(range(max(1, len(trained) - 1)), key=size)
    return list(trained[place : place + 2])


def _parameter_like(original: nn.Parameter, optimizer: Optimizer, *, smallest: bool) -> nn.Parameter:
    """As big as matters: a few parts where the optimizer is run on parts, else all of it; or as small as can be."""
    shape = torch.Size([1] * original.dim()) if smallest else original.shape
    if not smallest and is_elementwise(optimizer):
        shape = torch.Size([min(original.numel(), _PARTS * parts.LARGEST_PART)])
    parameter = nn.Parameter(torch.full(shape, 0.5, dtype=original.dtype, device=original.device))
    parameter.grad = torch.full_like(parameter, 1e-3)
    return parameter


def _group_of(parameter: nn.Parameter, optimizer: Optimizer) -> dict[str, Any]:
    return next(each for each in optimizer.param_groups if any(one is parameter for one in each["params"]))
