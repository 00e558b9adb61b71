"""Another optimizer like the one that a user made."""

import copy
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memfit.errors import InvalidInput

_COPIED = (dict, list, set, random.Random)  # fields that a step may change


def empty_twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and settings with no parameters, no state and no hooks; the other is not changed.

    A copy would not do: `copy.copy` loses what a subclass keeps beside its groups.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({name: _own(name, value, optimizer) for name, value in vars(optimizer).items()})
    twin.__dict__.pop("step", None)  # a scheduler puts a wrapper there that steps the original
    twin._optimizer_step_pre_hooks = OrderedDict()  # the user's are for the original
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.param_groups = []
    twin.state = defaultdict(dict)
    return twin


def twin_over(optimizer: Optimizer, stand_in: Callable[[nn.Parameter], nn.Parameter]) -> Optimizer:
    """A twin with other parameters wherever the optimizer keeps its own: in its groups, and in fields such as lists."""
    twin = empty_twin(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stand_ins = {id(parameter): stand_in(parameter) for parameter in parameters}
    fields = {name: value for name, value in vars(twin).items() if name not in {"param_groups", "state"}}
    twin.__dict__.update({name: _replaced(value, stand_ins) for name, value in fields.items()})
    twin.param_groups = [_replaced(group, stand_ins) for group in optimizer.param_groups]
    return twin


def _replaced(value: Any, stand_ins: Mapping[int, nn.Parameter]) -> Any:
    if isinstance(value, nn.Parameter):
        return stand_ins.get(id(value), value)
    if type(value) in {list, tuple}:
        return type(value)(_replaced(item, stand_ins) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, stand_ins) for key, item in value.items()}
    return value


def _own(name: str, value: Any, optimizer: Optimizer) -> Any:
    if isinstance(value, Optimizer):
        raise InvalidInput(
            f"{type(optimizer).__name__} wraps another optimizer ({name}: {type(value).__name__}), so what it takes "
            "cannot be found out without stepping yours; give the inner optimizer and wrap it afterwards"
        )
    return copy.copy(value) if isinstance(value, _COPIED) else value
