"""How big the parameters of a stand-in are, which updates are run on.

Note [Room of a stand-in]
    Its parameters, their gradients, its state and what an update allocates are all made beside the real ones. So they
    are counted before they are made, by letting the optimizer step on tensors without memory, and where they are more
    than the room there is, the parameters are halved until they fit. What an update works on at once (slices, or whole
    parameters) may then be smaller than it really is, and what was measured is scaled.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit import _torch
from memfit.accelerator import is_accelerator
from memfit.measure.optimizer import optimizer_memory
from memfit.optimizer_twin import empty_twin
from memfit.step import parts
from memfit.step.optimizers import is_elementwise
from memfit.step.policy import StepPolicy

_SLICES = 4  # of a stand-in: one is read ahead and one is written back while two are worked on
_LEAST_ELEMENTS = 2**10  # of a parameter
_WIDE_COPIES = 4  # of what is rounded to 16 bits at once: copies in 32, and the random bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandInSize:
    """The shapes of a stand-in's parameters, and whom they stand in for."""

    originals: Sequence[nn.Parameter]
    shapes: Sequence[torch.Size]
    needed_bytes: int = 0  # of the stand-in, while it is updated
    scale: float = 1.0  # how much more an update of the originals works on at once


def smallest_size(optimizer: Optimizer, trained: Sequence[nn.Parameter]) -> StandInSize:
    """Return a size of one element each: updating that takes what the calls take."""
    originals = _largest_neighbours(trained, _largest_slice(optimizer))
    return StandInSize(originals=originals, shapes=[torch.Size([1] * each.dim()) for each in originals])


def size_within(
    optimizer: Optimizer, policy: StepPolicy, trained: Sequence[nn.Parameter], room_bytes: int | None
) -> StandInSize:
    """Return a size as big as matters, or the largest that fits the room, see Note [Room of a stand-in]."""
    largest_slice = _largest_slice(optimizer)
    originals = _largest_neighbours(trained, largest_slice)
    most = max(each.numel() for each in originals)
    if largest_slice is not None:
        most = min(most, _SLICES * largest_slice)
    while True:
        shapes = [_shape_up_to(each.shape, most, flat=largest_slice is not None) for each in originals]
        needed_bytes = _needed_bytes(optimizer, policy, originals, shapes)
        if room_bytes is None or needed_bytes <= room_bytes or most <= _LEAST_ELEMENTS:
            break
        most //= 2
    ratios = [
        _at_once(each.shape, largest_slice) / max(1, _at_once(shape, largest_slice))
        for each, shape in zip(originals, shapes, strict=True)
    ]
    return StandInSize(originals=originals, shapes=shapes, needed_bytes=needed_bytes, scale=max(ratios))


def group_of(parameter: nn.Parameter, optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings that a parameter is trained with."""
    return next(each for each in optimizer.param_groups if any(one is parameter for one in each["params"]))


def _largest_slice(optimizer: Optimizer) -> int | None:
    return parts.LARGEST_PART if is_elementwise(optimizer) else None


def _largest_neighbours(trained: Sequence[nn.Parameter], largest_slice: int | None) -> list[nn.Parameter]:
    """The parameter and the one after it that together have the largest slices; the largest, without slices."""

    def size(place: int) -> tuple[int, int]:
        counts = [each.numel() for each in trained[place : place + 2]]
        if largest_slice is not None:
            return 0, sum(min(count, largest_slice) for count in counts)
        return max(counts), sum(counts)

    place = max(range(max(1, len(trained) - 1)), key=size)
    return list(trained[place : place + 2])


def _shape_up_to(shape: torch.Size, most: int, *, flat: bool) -> torch.Size:
    """A shape of so many elements at the most: of a flat slice, or of as many dimensions."""
    if flat:
        return torch.Size([min(shape.numel(), most)])
    sizes = list(shape)
    while math.prod(sizes) > most:
        longest = sizes.index(max(sizes))
        sizes[longest] //= 2
    return torch.Size(sizes)


def _at_once(shape: torch.Size, largest_slice: int | None) -> int:
    """Count the elements that an update works on at once."""
    return shape.numel() if largest_slice is None else min(shape.numel(), largest_slice)


def _needed_bytes(
    optimizer: Optimizer, policy: StepPolicy, originals: Sequence[nn.Parameter], shapes: Sequence[torch.Size]
) -> int:
    """Count what parameters of these shapes take with their gradients, their state, and an update."""
    with _torch.FakeTensorMode():
        parameters = [
            nn.Parameter(torch.empty(shape, dtype=original.dtype, device=original.device))
            for original, shape in zip(originals, shapes, strict=True)
        ]
    twin = empty_twin(optimizer)
    twin.param_groups = [
        {**group_of(original, optimizer), "params": [parameter]}
        for original, parameter in zip(originals, parameters, strict=True)
    ]
    memory = optimizer_memory(twin, parameters, for_cuda=is_accelerator(originals[0].device), room_bytes=0)
    held_bytes = 2 * sum(each.numel() * each.element_size() for each in parameters)
    copies = 1 + (policy.state_tier is not None) + _WIDE_COPIES * (policy.precision == "pure-bf16")
    return held_bytes + copies * (memory.state_bytes + memory.workspace_bytes)
