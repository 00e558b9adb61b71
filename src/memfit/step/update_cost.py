"""What an update of all parameters takes, in bytes and time, by each way there is to do it.

The optimizer's own step is asked without memory (`measure/optimizer.py`). Updates in parts are run for real, on a
stand-in as big as a few parts: their memory does not depend on how big parameters are, and their time is
that of an element and that of a call.
"""

import dataclasses
import logging

from torch.optim import Optimizer

from memfit.accelerator import is_accelerator
from memfit.measure.optimizer import optimizer_memory
from memfit.step.optimizers import is_elementwise, is_low_bit, parameters_of
from memfit.step.policy import StepPolicy
from memfit.step.stand_in import StandIn
from memfit.step.stand_in_size import size_within, smallest_size
from memfit.units import format_bytes

log = logging.getLogger(__name__)

_SPARE_BYTES = 2**16  # of the room: counters, and what single numbers take


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """Of all parameters once."""

    state_bytes: int  # of the optimizer, in memory
    workspace_bytes: int  # while it runs
    time_us: float
    carried_bytes: int = 0  # between the updates of two parameters: what is read ahead and what is written back
    is_timed: bool = True  # rather than estimated from updates of smaller parameters


def update_cost(optimizer: Optimizer, policy: StepPolicy, room_bytes: int | None = None) -> UpdateCost:
    """Measure an update as a policy wants it. Neither the optimizer nor its parameters change.

    `room_bytes` is what is left of a budget: no more is allocated here, see Note [Room of a stand-in].
    """
    trained = [each for each in parameters_of(optimizer) if each.requires_grad]
    memory = optimizer_memory(optimizer, trained, for_cuda=is_accelerator(trained[0].device), room_bytes=room_bytes)
    elements = sum(each.numel() for each in trained)
    room_bytes = None if room_bytes is None else max(0, room_bytes - _SPARE_BYTES)
    size = size_within(optimizer, policy, trained, room_bytes)
    is_timed = size.scale == 1 or is_elementwise(optimizer)
    if not is_timed:
        log.info("no room for whole parameters in %s: updates are timed on smaller ones", format_bytes(room_bytes or 0))
    with (
        StandIn(optimizer, policy, size, room_bytes=room_bytes) as big,
        StandIn(optimizer, policy, smallest_size(optimizer, trained)) as small,
    ):
        call_us = small.time_us() / len(small.parameters)
        element_us = max(0.0, big.time_us(cold=True) - call_us * len(big.parameters)) / big.elements
        time_us = len(trained) * call_us + elements * element_us
        if not policy.is_updated_in_parts:
            return UpdateCost(
                state_bytes=memory.state_bytes,
                workspace_bytes=big.workspace_bytes() if is_low_bit(optimizer) else memory.workspace_bytes,
                time_us=time_us,
                is_timed=is_timed,
            )
        counter_bytes = len(trained) * small.counter_bytes() // len(small.parameters)
        return UpdateCost(
            state_bytes=memory.state_bytes if policy.state_tier is None else counter_bytes,
            workspace_bytes=big.workspace_bytes(),
            time_us=time_us,
            carried_bytes=big.carried_bytes(),
            is_timed=is_timed,
        )


def untimed_cost(optimizer: Optimizer, policy: StepPolicy) -> UpdateCost:
    """Count the least that is known of an update without running one, for a budget that depends on it."""
    trained = [each for each in parameters_of(optimizer) if each.requires_grad]
    memory = optimizer_memory(optimizer, trained, for_cuda=is_accelerator(trained[0].device), room_bytes=0)
    return UpdateCost(
        state_bytes=0 if policy.state_tier is not None else memory.state_bytes,
        workspace_bytes=0 if policy.is_updated_in_parts or is_low_bit(optimizer) else memory.workspace_bytes,
        time_us=0.0,
        is_timed=False,
    )
