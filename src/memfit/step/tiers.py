"""Optimizer state in the next memory tier: read, updated and written part by part.

Note [Reading through]
    What an optimizer holds in its `state` are tensors that live in the tier, of the shape and dtype it would have made
    itself. `state_dict` reads them like any other. An update does not touch them: it copies a part out, works on the
    copy and writes it back, so no more than a few parts are ever in memory.
"""

import dataclasses
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import nn

from memfit import _torch
from memfit.errors import InvalidInput
from memfit.step.parts import Part, State, cut, is_like


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """Room for one tensor in a tier."""

    tensor: torch.Tensor  # reads through, see Note [Reading through]
    device: torch.device  # where it is needed
    offset_bytes: int = 0  # in a file


class Tier(Protocol):
    """Somewhere else than beside the parameters."""

    def reserve(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Place:
        """Find room for a tensor."""

    def read(self, place: Place, rows: slice | None) -> "Future[torch.Tensor]":
        """Start to bring a part of a tensor beside the parameters."""

    def write(self, place: Place, rows: slice | None, value: torch.Tensor) -> None:
        """Start to take a part of a tensor back. Whoever reads it later finds it."""

    def wait(self) -> None:
        """Until everything is written."""

    def close(self) -> None:
        """Give the room back."""


class TieredState:
    """The state of all parameters in one tier."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._places: dict[nn.Parameter, dict[str, Place]] = {}
        self._filled: set[nn.Parameter] = set()  # whose places hold a state: before its first update there is none
        self._coming: OrderedDict[tuple[nn.Parameter, int], dict[str, Future[torch.Tensor]]] = OrderedDict()

    def home_of(self, parameter: nn.Parameter, state: State) -> "TierHome":
        """Where the parts of one parameter find their state; what is not in the tier yet is brought there."""
        places = self._places.setdefault(parameter, {})
        for name, value in state.items():
            place = places.get(name)
            if _belongs_here(value) and (place is None or place.tensor is not value):
                self._adopt(parameter, name, value)
                state[name] = places[name].tensor
                self._filled.add(parameter)
        return TierHome(self, parameter, state)

    def prefetch(self, part: Part) -> None:
        """Start to read the state of a part that is updated next."""
        key = part.parameter, _start(part)
        if part.parameter in self._filled and key not in self._coming:
            places = self._places[part.parameter]
            self._coming[key] = {name: self.tier.read(place, part.rows) for name, place in places.items()}

    def arrived(self, part: Part) -> dict[str, torch.Tensor]:
        """What was read of the state of a part; nothing if there is none yet."""
        coming = self._coming.pop((part.parameter, _start(part)), {})
        return {name: future.result() for name, future in coming.items()}

    def place(self, parameter: nn.Parameter, name: str, shape: torch.Size, dtype: torch.dtype) -> Place:
        places = self._places.setdefault(parameter, {})
        if name not in places:
            places[name] = self.tier.reserve(shape, dtype, parameter.device)
        return places[name]

    def fill(self, parameter: nn.Parameter) -> None:
        """Note that the state of all parts of a parameter is on its way to the tier, to be read from now on."""
        self._filled.add(parameter)

    def settle(self) -> None:
        """Until everything is written; what was read ahead and not used is dropped."""
        self.tier.wait()
        self._coming.clear()

    def _adopt(self, parameter: nn.Parameter, name: str, value: torch.Tensor) -> None:
        place = self._places[parameter].get(name)
        if place is None or (place.tensor.shape, place.tensor.dtype) != (value.shape, value.dtype):
            self._places[parameter].pop(name, None)
            place = self.place(parameter, name, value.shape, value.dtype)
        self.tier.write(place, None, value)
        for key in [key for key in self._coming if key[0] is parameter]:
            del self._coming[key]  # read ahead before the state was replaced


class TierHome:
    """The state of one parameter while its parts are updated."""

    def __init__(self, states: TieredState, parameter: nn.Parameter, state: State) -> None:
        self._states = states
        self._parameter = parameter
        self._state = state
        self._made: State = {}

    def fetch(self, part: Part, following: Part | None) -> State:
        self._states.prefetch(part)
        if following is not None:
            self._states.prefetch(following)
        arrived = self._states.arrived(part)
        return {name: arrived[name] if name in arrived else cut(part, value) for name, value in self._state.items()}

    def keep(self, part: Part, state: State) -> None:
        for name, value in state.items():
            in_slices = part.rows is not None and is_like(part, value)
            if not _belongs_here(value):
                self._made[name] = value
                continue
            shape = self._parameter.shape if in_slices else value.shape
            place = self._states.place(self._parameter, name, shape, value.dtype)
            self._states.tier.write(place, part.rows if in_slices else None, value)
            self._made[name] = place.tensor

    def close(self) -> State:
        self._state.update(self._made)
        self._states.fill(self._parameter)
        return self._state


def _belongs_here(value: Any) -> bool:
    """Whether a state goes to the tier; numbers and counters stay."""
    if not isinstance(value, torch.Tensor) or not value.dim() or not value.numel():
        return False
    if not _torch.is_plain(value):
        raise InvalidInput(
            f"the optimizer keeps its state in a {type(value).__name__}, which cannot be moved to another tier; use it "
            "without state_tier, or an optimizer of torch.optim"
        )
    return True


def _start(part: Part) -> int:
    return -1 if part.rows is None else part.rows.start
