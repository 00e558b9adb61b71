"""All lean operators, and their functions by name."""

from collections.abc import Callable, Collection
from typing import Any

import torch

from memfit.ops.batch_norm import BATCH_NORM
from memfit.ops.batch_norm_backward import BATCH_NORM_BACKWARD
from memfit.ops.bits import BITS
from memfit.ops.convolution_backward import CONVOLUTION_BACKWARD
from memfit.ops.convolution_by_samples import CONVOLUTION_BY_SAMPLES
from memfit.ops.cross_entropy import CROSS_ENTROPY
from memfit.ops.dropout import DROPOUT
from memfit.ops.lean import LeanOperator
from memfit.ops.lossy import EIGHT_BIT, FOUR_BIT, SIXTEEN_BIT
from memfit.ops.max_pool import MAX_POOL
from memfit.ops.offload import OFFLOAD
from memfit.ops.relu import RELU
from memfit.ops.stretch import STRETCH, Stretch, find_stretch
from memfit.ops.tied_embedding import TIED_EMBEDDING

LEAN_OPERATORS: tuple[LeanOperator, ...] = (
    BITS,
    DROPOUT,
    RELU,
    MAX_POOL,
    BATCH_NORM,
    BATCH_NORM_BACKWARD,
    CONVOLUTION_BACKWARD,
    CONVOLUTION_BY_SAMPLES,
    SIXTEEN_BIT,
    EIGHT_BIT,
    FOUR_BIT,
    CROSS_ENTROPY,
    TIED_EMBEDDING,
    OFFLOAD,
    STRETCH,
)


def name_of(target: Any) -> str:
    """The name of an operator (`aten.relu.default`) or of a function of ours (`memfit.ops.bits:pack`)."""
    if isinstance(target, torch._ops.OpOverload) or not callable(target):
        return str(target)
    return f"{target.__module__}:{target.__name__}"


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name_of(function): function for operator in LEAN_OPERATORS for function in operator.functions
}


def find_function(name: str) -> Callable[..., Any] | None:
    """The function of a lean operator with this name, or a stretch; no other function can be named."""
    return _FUNCTIONS.get(name) or find_stretch(name)


_IN_PLACE = {function: form for operator in LEAN_OPERATORS for function, form in operator.in_place.items()}


def in_place_function(function: Any) -> Callable[..., Any] | None:
    """The form of a lean operator's function that overwrites its first argument, if there is one."""
    return function.in_place if isinstance(function, Stretch) else _IN_PLACE.get(function)


def find_lean_operator(name: str) -> LeanOperator:
    """The lean operator of a name."""
    return next(operator for operator in LEAN_OPERATORS if operator.name == name)


def chosen(techniques: Collection[str]) -> tuple[LeanOperator, ...]:
    """The lean operators that these techniques switch on; names of other techniques switch on none."""
    return tuple(operator for operator in LEAN_OPERATORS if operator.technique in techniques)


def is_lean_function(target: Any) -> bool:
    """Return whether this is a function of a lean operator in the form that writes into none of its arguments."""
    return callable(target) and target in _READING


_READING = {function for function in _FUNCTIONS.values() if not function.__name__.endswith("_")} - set(
    _IN_PLACE.values()
)
