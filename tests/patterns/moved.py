"""Models that have to be run to be planned, and change something whenever they run."""

import copy
from typing import Any

import numpy as np
import torch

from patterns.borders import Looks
from patterns.pattern import Pattern, State

MEANS = np.zeros(16)


class MomentumQueue(Looks):
    """A momentum encoder and a queue whose pointer is read as a number, as MoCo has them."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.stem).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(16, 64))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def around(self, hidden: torch.Tensor) -> torch.Tensor:
        self.follow()
        return super().around(hidden) + hidden.detach() @ self.queue.clone() @ self.queue.t()

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.slow.parameters(), self.stem.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        place = int(self.pointer)
        self.queue[:, place : place + 16] = self.slow.weight
        self.pointer[0] = (place + 16) % 64


class KeepsMeans(Looks):
    """Adds to an array of its module, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(1)

    def around(self, hidden: torch.Tensor) -> torch.Tensor:
        MEANS[:] += hidden.detach().mean(0).numpy()
        return super().around(hidden) * float(self.generator.random())


def means_cleared(state: State) -> None:
    MEANS[:] = 0


def means_of(state: State) -> Any:
    return [MEANS.tolist(), str(state.model.generator.bit_generator.state)]


PATTERNS = [
    Pattern(name="a momentum encoder and a queue with `int(self.pointer)`", make=MomentumQueue),
    Pattern(
        name="a global array and a NumPy generator, written in the forward",
        make=KeepsMeans,
        before_fit=means_cleared,
        beside=means_of,
    ),
]
