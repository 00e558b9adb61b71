"""Another optimizer like the one that a user made."""

import copy
import random
from collections import OrderedDict, defaultdict
from typing import Any

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


def _own(name: str, value: Any, optimizer: Optimizer) -> Any:
    if isinstance(value, Optimizer):
        raise InvalidInput(
            f"{type(optimizer).__name__} wraps another optimizer ({name}: {type(value).__name__}), so what it takes "
            "cannot be found out without stepping yours; give the inner optimizer and wrap it afterwards"
        )
    return copy.copy(value) if isinstance(value, _COPIED) else value
