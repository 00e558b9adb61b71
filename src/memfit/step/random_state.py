"""The state of every random number generator a training run may draw from."""

import random
import sys
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Of Python, torch on every device, and NumPy if it is in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *map(_plain, rest))
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put all generators where they were."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


def _plain(number: Any) -> int | float:
    return float(number) if isinstance(number, float) else int(number)
