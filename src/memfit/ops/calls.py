"""How to call an operator outside autograd so that it does what it does inside.

Note [Grad mode below autograd]
    A few kernels ask whether grad mode is on to decide what they return: oneDNN's LSTM layer
    makes the workspace its backward needs only then. A captured graph runs with grad mode off,
    so such operators are called with it on, below autograd, as the eager run calls them.
"""

from collections.abc import Callable
from typing import Any

import torch

from memfit import _torch


def faithful_call(target: Any) -> Callable[..., Any]:
    """The function to call for `target` in a captured graph, as fast as it can be called."""
    if str(target) in _ASKING_FOR_GRAD_MODE:
        return _with_grad_mode(target)
    function: Callable[..., Any] = _torch.plain_function(target)
    return function


_ASKING_FOR_GRAD_MODE = {"aten.mkldnn_rnn_layer.default"}


def _with_grad_mode(target: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), _torch.below_autograd():
            return target(*args, **kwargs)

    return call
