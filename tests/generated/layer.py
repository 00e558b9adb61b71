"""The base of all building blocks, and the table of them by kind."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

CHANNELS_FIRST = ("signal", "image", "volume")
EVERY = ("rows", "sequence", *CHANNELS_FIRST)


@dataclasses.dataclass(frozen=True)
class Stream:
    """What flows between two layers: (batch, channels), (batch, time, channels) or (batch, channels, ...)."""

    domain: str
    shape: tuple[int, ...]

    @property
    def channel_axis(self) -> int:
        return 1 if self.domain in ("rows", *CHANNELS_FIRST) else 2

    @property
    def channels(self) -> int:
        return self.shape[self.channel_axis]

    @property
    def spatial(self) -> int:
        """How many axes there are beside batch and channels."""
        return len(self.shape) - 2

    @property
    def size(self) -> int:
        """The smallest of those axes."""
        return min((length for axis, length in enumerate(self.shape) if axis not in (0, self.channel_axis)), default=1)


class Layer(nn.Module):
    """A building block. It is given the stream that comes in, and options that `draw` made."""

    takes: ClassVar[tuple[str, ...]] = EVERY
    makes: ClassVar[str | None] = None  # None: the domain that it takes
    holds_layers: ClassVar[bool] = False  # whether it is given layers that it runs inside

    @staticmethod
    def draw(rng: random.Random) -> dict[str, Any]:
        """Options of a new block, as plain data."""
        return {}

    def __init__(self, stream: Stream) -> None:
        super().__init__()


LAYERS: dict[str, type[Layer]] = {}


def layer(kind: str) -> Callable[[type[Layer]], type[Layer]]:
    """Put a class into the table."""

    def add(cls: type[Layer]) -> type[Layer]:
        assert kind not in LAYERS, kind
        LAYERS[kind] = cls
        return cls

    return add


def divisor(number: int, wanted: int) -> int:
    """The largest divisor of a number that is not above what is wanted."""
    return next(each for each in range(min(number, wanted), 0, -1) if number % each == 0)


def full_precision(x: torch.Tensor) -> torch.Tensor:
    """For operators that have no kernel in 16 bits."""
    return x if x.dtype == torch.float64 else x.float()
