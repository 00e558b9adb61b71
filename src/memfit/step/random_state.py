"""The state of every random number generator a training run may draw from."""

import random
import sys
from typing import Any

import torch

from memfit.accelerator import generator_states, initialized_accelerators, set_generator_states


def random_state() -> dict[str, Any]:
    """Of Python, torch on every device, and NumPy if it is in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if devices := initialized_accelerators():
        own = generator_states(devices)
        kind = devices[0].type
        state[kind] = [own[str(device)] for device in devices]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *map(_plain, rest))
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put all generators where they were."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    for device in initialized_accelerators():
        of_kind = state.get(device.type, [])
        if device.index < len(of_kind):
            set_generator_states({str(device): of_kind[device.index]})
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


def _plain(number: Any) -> int | float:
    return float(number) if isinstance(number, float) else int(number)
