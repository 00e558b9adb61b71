"""Operator calls as text: equal text, equal cost.

A signature names the operator and describes its arguments: dtype, shape and strides of
tensors, and all constants. It is JSON, so that a call can be made again from it alone.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.ops.registry import find_function, name_of

_NOT_COMPILED = "!"
_TENSOR, _DTYPE, _LAYOUT, _FORMAT, _DEVICE = "tensor", "dtype", "layout", "memory_format", "device"


def encode(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Describe a call; tensors may be real or fake."""
    call = [_name(target), [_encode(arg) for arg in args], {key: _encode(kwargs[key]) for key in sorted(kwargs)}]
    return json.dumps(call, separators=(",", ":"))


def decode(signature: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """The operator and arguments of a call with the same cost, tensors filled with valid values."""
    name, args, kwargs = json.loads(signature)
    return (
        find_operator(name),
        [_decode(arg) for arg in args],
        {key: _decode(value) for key, value in kwargs.items()},
    )


def with_operator(signature: str, target: Any) -> str:
    """The call of another operator with the same arguments."""
    return json.dumps([_name(target), *json.loads(signature)[1:]], separators=(",", ":"))


def find_operator(name: str) -> Any:
    """The operator called `namespace.name.overload`, or a function of a lean operator of ours."""
    function = find_function(name.removesuffix(_NOT_COMPILED))
    if function is not None:
        return function
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _name(target: Any) -> str:
    """Of what runs: a form that stands in for another is measured under its own name.

    What is not compiled, but should be, allocates and takes more.
    """
    runs = getattr(target, "stand_in", None) or target
    return name_of(runs) + (_NOT_COMPILED if getattr(runs, "failure", "") else "")


def _encode(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [dtype, list(value.shape), list(value.stride()), str(value.device)]}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    for name, cls in _CONSTANTS.items():
        if isinstance(value, cls):
            return {name: str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


_CONSTANTS: dict[str, type] = {
    _DTYPE: torch.dtype,
    _LAYOUT: torch.layout,
    _FORMAT: torch.memory_format,
    _DEVICE: torch.device,
}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _TENSOR:
        return _filled(*content)
    return torch.device(content) if kind == _DEVICE else getattr(torch, content)


def _filled(dtype_name: str, shape: list[int], stride: list[int], device: str) -> torch.Tensor:
    """A tensor of this description whose values no operator rejects: zeros are valid indices."""
    dtype = getattr(torch, dtype_name)
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if dtype.is_floating_point and tensor.numel():
        # Not zeros: denormals, sparsity or a shortcut for zero would flatter the time.
        return tensor.fill_(0.5)
    return tensor.fill_(dtype is torch.bool)
