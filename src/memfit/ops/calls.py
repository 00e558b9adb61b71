"""How to call an operator outside autograd so that it does what it does inside.

Note [Grad mode below autograd]
    A few kernels ask whether grad mode is on to decide what they return: oneDNN's LSTM layer
    makes the workspace its backward needs only then. A captured graph runs with grad mode off,
    so such operators are called with it on, below autograd, as the eager run calls them.

Note [The shortest way in]
    There are two ways to call an operator from Python: by its overload, which reads the operator's schema at every
    call, or by the function that torch has for the name, which takes half a microsecond less and looks for the
    overload itself, by the types of the arguments. So the second is taken where it was seen to end at the very
    overload, with the same arguments. A tensor without dimensions may pass for a number there, and is left to the
    first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memfit import _torch


def faithful_call(target: Any) -> Callable[..., Any]:
    """The function to call for `target` in a captured graph, as fast as it can be called."""
    if str(target) in _ASKING_FOR_GRAD_MODE:
        return _with_grad_mode(target)
    function: Callable[..., Any] = _torch.plain_function(target)
    return function


def quick_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The same for arguments like these, of which tensors are read for their kind alone: often quicker to call."""
    usual = faithful_call(target)
    if usual is target or str(target) in _ASKING_FOR_GRAD_MODE:
        return usual
    kind = target, _kind(args), _kind(list(kwargs.items()))
    if kind not in _QUICK_CALLS:
        _QUICK_CALLS[kind] = _shortest(target, args, kwargs) or usual
    return _QUICK_CALLS[kind]


_QUICK_CALLS: dict[Any, Callable[..., Any]] = {}


def _kind(value: Any) -> Any:
    """All that decides which overload a function of torch takes."""
    if isinstance(value, torch.Tensor):
        return "number" if value.dim() == 0 else value.dtype
    if isinstance(value, list | tuple):
        return tuple(_kind(each) for each in value)
    return value if isinstance(value, str) else type(value)


def _shortest(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """See Note [The shortest way in]."""
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    if any(tensor.dim() == 0 for tensor in tensors):
        return None
    with _torch.no_modes():
        like_args, like_kwargs = pytree.tree_map_only(torch.Tensor, _stand_in, (list(args), dict(kwargs)))
        wanted = _all_arguments(target, like_args, like_kwargs)
        for function in _torch.functions_named(target):
            overload, found_args, found_kwargs = _torch.first_operator(function, like_args, like_kwargs)
            if overload is target and _are_same(wanted, _all_arguments(overload, found_args, found_kwargs)):
                return function
    return None


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty([1] * tensor.dim(), dtype=tensor.dtype, device="meta")


def _all_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Those that were left out among them."""
    places = enumerate(target._schema.arguments)
    return [
        args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        for place, argument in places
    ]


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return type(one) is type(other) and bool(one == other)


# Operators that write into their arguments, which their schemas do not say.
WRITES_STATISTICS = (torch.ops.aten.cudnn_batch_norm.default, torch.ops.aten.miopen_batch_norm.default)

_ASKING_FOR_GRAD_MODE = {"aten.mkldnn_rnn_layer.default"}


def _with_grad_mode(target: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), _torch.below_autograd():
            return target(*args, **kwargs)

    return call
