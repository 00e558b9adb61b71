"""Another optimizer like the one that a user made."""

from collections import OrderedDict, defaultdict

from torch.optim import Optimizer


def empty_twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and settings with no parameters, no state and no hooks; the other is not changed.

    A copy would not do: `copy.copy` loses what a subclass keeps beside its groups.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler puts a wrapper there that steps the original
    twin._optimizer_step_pre_hooks = OrderedDict()  # the user's are for the original
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.param_groups = []
    twin.state = defaultdict(dict)
    return twin
