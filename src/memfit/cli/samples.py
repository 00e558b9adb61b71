"""From `--input 16x3x224x224` to the arguments of one call of the model."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from memfit.capture.sample import Sample
from memfit.cli import reference as references
from memfit.cli.models import default_dtype
from memfit.cli.reference import Reference
from memfit.errors import InvalidSample

_EXAMPLES = "write for example 16x3x224x224, 1x2048:int64 or input_ids=1x2048:int64"
_DTYPE_NAMES = (
    *("float64", "float32", "bfloat16", "float16"),
    *("int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"),
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES}
_INPUT = re.compile(r"(?:(?P<name>[^=:]*)=)?(?P<shape>[^=:]*)(?::(?P<dtype>[^=:]*))?")
_SIZE = re.compile(r"[0-9]{1,18}")
_LARGEST_NUMEL = 2**59  # 16 bytes each still are a number of bytes that torch can count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One tensor of the sample."""

    shape: tuple[int, ...]
    name: str | None = None  # None: positional
    dtype: torch.dtype | None = None  # None: the model's

    def tensor(self, dtype: torch.dtype | None) -> torch.Tensor:
        """Random numbers; whole ones are 0 or 1, which nearly every table of words or classes has."""
        kind = self.dtype or dtype or torch.get_default_dtype()
        if kind.is_floating_point or kind.is_complex:
            return torch.randn(self.shape, dtype=kind)
        return torch.randint(2, self.shape, dtype=kind)


def parse_input(text: str) -> Input:
    """Read one `--input`.

    >>> parse_input("input_ids=1x2048:int64")
    Input(shape=(1, 2048), name='input_ids', dtype=torch.int64)
    """
    match = _INPUT.fullmatch(text.strip())
    if match is None:
        raise InvalidSample(f"--input {text!r} has more than one name or dtype; {_EXAMPLES}")
    name, shape, dtype = match["name"], match["shape"], match["dtype"]
    if name is not None and not name.isidentifier():
        raise InvalidSample(f"--input {text!r}: {name!r} cannot be the name of an argument; {_EXAMPLES}")
    if dtype is not None and dtype not in _DTYPES:
        raise InvalidSample(f"--input {text!r}: {dtype!r} is not a dtype; known are {', '.join(_DTYPES)}")
    return Input(shape=_shape(text, shape), name=name, dtype=None if dtype is None else _DTYPES[dtype])


def parse_inputs(texts: Sequence[str]) -> tuple[Input, ...]:
    """Read every `--input`; a name can be given once."""
    inputs = tuple(parse_input(text) for text in texts)
    names = [each.name for each in inputs if each.name is not None]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise InvalidSample(f"--input {repeated[0]} is given {names.count(repeated[0])} times; give each name once")
    return inputs


def parse_sample(text: str) -> Reference:
    """Read what `--sample` names; nothing is imported yet."""
    reference = references.parse(text, InvalidSample)
    if reference.args or reference.kwargs:
        reference.fail("the function that makes the sample is called without arguments; leave them out")
    return reference


def build_sample(inputs: Sequence[Input], dtype: torch.dtype | None = None) -> Sample:
    """Make the tensors; `dtype` is for those that do not say their own. Call it under `memfit.without_weights()`."""
    args = tuple(each.tensor(dtype) for each in inputs if each.name is None)
    kwargs = {each.name: each.tensor(dtype) for each in inputs if each.name is not None}
    return Sample(args, kwargs)


def call_sample(reference: Reference, make: Any, dtype: torch.dtype | None = None) -> Sample:
    """Let the user's function make the sample. Call it under `memfit.without_weights()`."""
    advice = "it is called without arguments, and its tensors have shapes but no values here"
    with reference.explaining("making the sample", advice), default_dtype(dtype):
        made = make()
    sample = Sample.of(made)
    if not any(True for _ in sample.tensors()):
        reference.fail(
            f"a sample was expected, calling this gave a {type(made).__name__} without tensors; return a tensor, "
            "a tuple of positional arguments or a dict of keyword arguments"
        )
    return sample


def _shape(text: str, shape: str) -> tuple[int, ...]:
    sizes = shape.split("x")
    for size in sizes:
        if not _SIZE.fullmatch(size) or int(size) == 0:
            found = f"{size!r} is not a size (a positive whole number)" if size else "a size is missing"
            raise InvalidSample(f"--input {text!r}: in the shape {shape!r} {found}; {_EXAMPLES}")
    numbers = tuple(map(int, sizes))
    if math.prod(numbers) > _LARGEST_NUMEL:
        raise InvalidSample(f"--input {text!r}: no machine holds that many numbers; {_EXAMPLES}")
    return numbers
