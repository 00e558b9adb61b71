"""Draw the same random numbers again, and leave the generator where the eager run leaves it.

Note [Replayed draws]
    A random operator that is run again later is first run after its generator's state was read.
    The state (5 kB on CPU) crosses to the backward pass like any saved tensor, so that a retained
    graph can replay it as often as it likes. A replay sets the state, draws, and puts the
    generator back, whatever happens: nobody else sees that it was moved.
"""

from collections.abc import Callable
from typing import Any

import torch

from memfit.ops.calls import faithful_call


def generator_state(device: torch.device) -> torch.Tensor:
    """Where the default generator of a device stands."""
    state: torch.Tensor = _module_of(device).get_rng_state(*_which(device))
    return state


def replaying(target: Any, device: torch.device) -> Callable[..., Any]:
    """The function `(state, *args)` that runs a random operator as it ran when `state` was read."""
    run = faithful_call(target)
    module, which = _module_of(device), _which(device)

    def replay(state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        now = module.get_rng_state(*which)
        module.set_rng_state(state, *which)
        try:
            return run(*args, **kwargs)
        finally:
            module.set_rng_state(now, *which)

    return replay


def _module_of(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """The CPU has one generator, other kinds of devices have one each."""
    return () if device.type == "cpu" else (device,)
