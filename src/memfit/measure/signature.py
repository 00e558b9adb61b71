"""Operator calls as text: equal text, equal cost.

A signature names the operator and describes its arguments: dtype, shape and strides of
tensors, and all constants. It is JSON, so that a call can be made again from it alone.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from memfit.ops.calls import WRITES_STATISTICS
from memfit.ops.registry import find_function, is_lean_function, name_of

_NOT_COMPILED = "!"
_TENSOR, _DTYPE, _LAYOUT, _FORMAT, _DEVICE = "tensor", "dtype", "layout", "memory_format", "device"


def encode(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Describe a call; tensors may be real or fake."""
    call = [_name(target), [_encode(arg) for arg in args], {key: _encode(kwargs[key]) for key in sorted(kwargs)}]
    return json.dumps(call, separators=(",", ":"))


def decode(signature: str, *, shares_memory: bool = False) -> tuple[Any, list[Any], dict[str, Any]]:
    """Make the operator and the arguments of a call with the same cost, tensors filled with valid values.

    With `shares_memory`, arguments of one dtype lie in the same memory, if the operator only reads them.
    """
    name, args, kwargs = json.loads(signature)
    operator = find_operator(name)
    filled = _Filled(_shared_bytes(args, kwargs) if shares_memory and _only_reads(operator) else {})
    return (
        operator,
        [_decode(arg, filled) for arg in args],
        {key: _decode(value, filled) for key, value in kwargs.items()},
    )


def with_channels_last(signature: str, places: Sequence[int]) -> str:
    """Describe the same call with images laid out with their channels last, at some places of its arguments."""
    name, args, kwargs = json.loads(signature)
    for place in places:
        dtype, shape, stride, device = args[place][_TENSOR]
        if len(shape) == 4:
            _, channels, height, width = shape
            stride = [channels * height * width, 1, width * channels, channels]
        args[place] = {_TENSOR: [dtype, shape, stride, device]}
    return json.dumps([name, args, kwargs], separators=(",", ":"))


def with_fewer_rows(signature: str, times: int) -> str | None:
    """Describe a call on as many times fewer rows; None if it is not known how, or there is one row only.

    Only for operators that check the shapes they are given: others may read beyond the end of an argument.
    """
    name, args, kwargs = json.loads(signature)
    contents = [args[place][_TENSOR] for place in _ROW_ARGUMENTS.get(name, ())]
    rows = {shape[0] for _, shape, _, _ in contents if shape}
    if len(rows) != 1 or rows == {1}:
        return None
    for _, shape, _, _ in contents:
        shape[0] = max(1, shape[0] // times)
    return json.dumps([name, args, kwargs], separators=(",", ":"))


def rows(signature: str) -> int:
    """Return on how many rows a call runs of which `with_fewer_rows` makes another."""
    name, args, _ = json.loads(signature)
    _, shape, _, _ = args[_ROW_ARGUMENTS[name][0]][_TENSOR]
    count: int = shape[0]
    return count


_ROW_ARGUMENTS = {  # places of the arguments that have a row a sample
    "aten.mm.default": (0,),
    "aten.addmm.default": (1,),
    "aten.bmm.default": (0, 1),
    "aten.convolution.default": (0,),
    "aten.convolution_backward.default": (0, 1),
}


def operator_name(signature: str) -> str:
    """Return the name of what a signature calls."""
    return signature[2 : signature.index('"', 2)]


def kind(signature: str) -> str:
    """Return what calls of one kind have in common: the operator, and single numbers that it is given, as `groups`."""
    name, args, _ = json.loads(signature)
    return json.dumps([name, *(each for each in args if isinstance(each, bool | int | float))])


def argument_bytes(signature: str) -> list[int]:
    """Return the bytes of every tensor that a call reads."""
    _, args, kwargs = json.loads(signature)
    return [_bytes(*content) for content in _tensors([args, kwargs])]


def decoded_bytes(signature: str) -> int:
    """Return the bytes that `decode` takes with `shares_memory`."""
    name, args, kwargs = json.loads(signature)
    if _only_reads(known_operator(name)):
        return sum(_shared_bytes(args, kwargs).values())
    return sum(_bytes(*content) for content in _tensors([args, kwargs]))


def devices(signature: str) -> list[torch.device]:
    """Return the devices of what a call reads and of where it makes something, each once."""
    _, args, kwargs = json.loads(signature)
    named = [each[_DEVICE] for each in _constants([args, kwargs]) if _DEVICE in each]
    return [torch.device(name) for name in dict.fromkeys([*(each[3] for each in _tensors([args, kwargs])), *named])]


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


def _decode(value: Any, filled: "_Filled") -> Any:
    if isinstance(value, list):
        return [_decode(item, filled) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _TENSOR:
        return filled.tensor(*content)
    return torch.device(content) if kind == _DEVICE else getattr(torch, content)


def _tensors(value: Any) -> Iterator[list[Any]]:
    """The descriptions of all tensors in a decoded call."""
    if isinstance(value, list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for kind, content in value.items():
            if kind == _TENSOR and isinstance(content, list):
                yield content
            else:
                yield from _tensors(content)


def _constants(value: Any) -> Iterator[dict[str, Any]]:
    """The dtypes, layouts and devices among the arguments of a decoded call."""
    if isinstance(value, list):
        for item in value:
            yield from _constants(item)
    elif isinstance(value, dict):
        (kind, content), *others = value.items() or [("", None)]
        if not others and kind in (_DTYPE, _LAYOUT, _FORMAT, _DEVICE) and isinstance(content, str):
            yield value
        else:
            for each in value.values():
                yield from _constants(each)


def _shared_bytes(args: Any, kwargs: Any) -> dict[tuple[str, str], int]:
    """By dtype and device: the bytes of the largest tensor."""
    largest: dict[tuple[str, str], int] = {}
    for dtype, shape, stride, device in _tensors([args, kwargs]):
        key = dtype, device
        largest[key] = max(largest.get(key, 0), _bytes(dtype, shape, stride, device))
    return largest


def _bytes(dtype: str, shape: Sequence[int], stride: Sequence[int], _device: str) -> int:
    return _element_count(shape, stride) * int(getattr(torch, dtype).itemsize)


def _element_count(shape: Sequence[int], stride: Sequence[int]) -> int:
    if not all(shape):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def known_operator(name: str) -> Any:
    """Return the operator of a name; None if this torch does not have it."""
    try:
        return find_operator(name)
    except (AttributeError, ValueError):  # one that this torch does not have: it will not be run
        return None


def _only_reads(operator: Any) -> bool:
    """Return whether an operator is known to write into none of its arguments."""
    if is_lean_function(operator):
        return True
    schema = getattr(operator, "_schema", None)
    return schema is not None and not schema.is_mutable and operator not in WRITES_STATISTICS


class _Filled:
    """Makes tensors whose values no operator rejects: zeros are valid indices."""

    def __init__(self, shared_bytes: Mapping[tuple[str, str], int]) -> None:
        self._shared_bytes = shared_bytes
        self._memory: dict[tuple[str, str], torch.Tensor] = {}

    def tensor(self, dtype_name: str, shape: list[int], stride: list[int], device: str) -> torch.Tensor:
        dtype = getattr(torch, dtype_name)
        key = dtype_name, device
        if key not in self._shared_bytes:
            return _fill(torch.empty_strided(shape, stride, dtype=dtype, device=device))
        if key not in self._memory:
            count = self._shared_bytes[key] // dtype.itemsize
            self._memory[key] = _fill(torch.empty(count, dtype=dtype, device=device))
        return self._memory[key].as_strided(shape, stride)


def _fill(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point and tensor.numel():
        # Not zeros: denormals, sparsity or a shortcut for zero would flatter the time.
        return tensor.fill_(0.5)
    return tensor.fill_(tensor.dtype is torch.bool)
