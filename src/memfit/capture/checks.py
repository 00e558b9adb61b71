"""Checks of values that eager makes and a trace drops.

Note [Checks of values]
    An operator that only looks at values makes nothing, so nothing in a graph would run it: a forward that calls one is
    refused, unless its answer is known. `one_hot` is traced by a formula that takes any label, where eager looks at
    them; what it is traced as instead fails where eager does.
"""

from typing import Any

import torch

_LOOKS = {torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg}


def is_check(operator: Any) -> bool:
    """Return whether an operator looks at a value, and makes none."""
    return operator in _LOOKS


def refuse_check(answer: Any) -> None:
    """Refuse a check whose answer is not known to be yes."""
    if not answer:
        raise ValueError(
            "the forward checks values by torch._assert_async, which a captured call would not do; check them in the "
            "loop, or leave that part out of the module that is captured"
        )


def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Do as `torch.nn.functional.one_hot`, and fail for labels out of its range in a graph as well."""
    if num_classes <= 0 or tensor.numel() == 0 or tensor.dtype is not torch.int64:
        return torch.nn.functional.one_hot(tensor, num_classes)
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)
