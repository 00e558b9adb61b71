"""Forwards that draw numbers, or take turns, from generators of all kinds."""

import itertools
import os
import random

import numpy as np
import torch
from torch import nn

from patterns.models import Blocks, Net
from patterns.pattern import LEFT, Pattern


class DropsByRandom(Blocks):
    def is_kept(self, place: int) -> bool:
        return random.random() > 0.3


class DropsByNumpy(Blocks):
    def is_kept(self, place: int) -> bool:
        return np.random.rand() > 0.3


class DropsByTorch(Blocks):
    def is_kept(self, place: int) -> bool:
        return bool(torch.rand(()) > 0.3)


class DropsByOwnRandom(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def is_kept(self, place: int) -> bool:
        return self.random.random() > 0.3


class DropsByModuleRandom(Blocks):
    """With a generator that is a global."""

    def is_kept(self, place: int) -> bool:
        return GENERATOR.random() > 0.3


GENERATOR = random.Random(0)


class DropsInTurn(Blocks):
    """With an iterator on self."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = itertools.cycle([True, False, True, True, True])

    def is_kept(self, place: int) -> bool:
        return next(self.turns)


class DropsByEnvironment(Blocks):
    def is_kept(self, place: int) -> bool:
        return os.environ.get("PATTERN_DEPTH", "3") > str(place)


class DrawsFromGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 0.1 * torch.rand(hidden.shape, generator=self.generator)


class DrawsFromTorch(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(hidden + 0.1 * torch.randn_like(hidden), 0.3)


class SeedsItself(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return nn.functional.dropout(hidden, 0.3)


class ForksTheGenerator(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return nn.functional.dropout(hidden, 0.3)


def seeded() -> nn.Module:
    GENERATOR.seed(0)
    return DropsByModuleRandom()


PATTERNS = [
    Pattern(
        name="blocks left out by random.random()",
        make=DropsByRandom,
        slow=True,
    ),
    Pattern(
        name="blocks left out by numpy.random",
        make=DropsByNumpy,
        slow=True,
    ),
    Pattern(
        name="blocks left out by torch.rand",
        make=DropsByTorch,
        slow=True,
    ),
    Pattern(
        name="blocks left out by a random.Random on self",
        make=DropsByOwnRandom,
        beside=lambda state: str(state.model.random.getstate()),
        slow=True,
    ),
    Pattern(
        name="blocks left out by a random.Random that is a global",
        make=seeded,
        beside=lambda state: str(GENERATOR.getstate()),
    ),
    Pattern(
        name="blocks left out in turn, by an iterator on self",
        outcome="the forward moves on an iterator",
        make=DropsInTurn,
        beside=lambda state: [next(state.model.turns) for _ in range(5)],
    ),
    Pattern(
        name="a variable of the environment read by the forward, changed",
        make=DropsByEnvironment,
        change=lambda state, number: os.environ.update(PATTERN_DEPTH="3" if number < 10 else "2"),
        end=lambda state: os.environ.pop("PATTERN_DEPTH", None),
    ),
    Pattern(
        name="noise from a torch.Generator on self",
        outcome=LEFT + "a generator of its own",
        make=DrawsFromGenerator,
        beside=lambda state: state.model.generator.get_state(),
    ),
    Pattern(
        name="noise and dropout from torch's own generator",
        make=DrawsFromTorch,
        slow=True,
    ),
    Pattern(
        name="torch.manual_seed in the forward",
        outcome=LEFT + "seeds torch's generator",
        make=SeedsItself,
    ),
    Pattern(
        name="torch.random.fork_rng in the forward",
        make=ForksTheGenerator,
        outcome=LEFT + "sets the state of torch's generator",
    ),
]
