"""Compare the results of two steps, tensor by tensor and a few kilobytes at a time."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from memfit.capture.rehearse import Result
from memfit.capture.spilled import SpillFile, StoredTensor, chunks_of

PARTS = tuple(field.name for field in dataclasses.fields(Result))
_ONE_FLOAT = torch.finfo(torch.float32).eps

AnyTensor = torch.Tensor | StoredTensor
StoredResult = Mapping[str, Mapping[str, StoredTensor]]  # by part and name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Compare one part of the planned step with the eager one."""

    part: str  # "outputs", "gradients", "buffers", "generator"
    compared: int  # tensors
    equal: int  # of them bit for bit
    largest_difference: float  # relative to the largest number of the same eager tensor
    worst: str  # where that is
    beyond_rounding: float  # the same; of gradients without what is below one float's rounding of the largest of them


def stored(file: SpillFile, result: Result) -> StoredResult:
    """Put everything a step made into a file."""
    return {part: {name: file.store(tensor) for name, tensor in getattr(result, part).items()} for part in PARTS}


Undecided = Mapping[str, frozenset[str]]  # by part: names of what two eager steps make differently


def compared(
    eager: StoredResult, planned: Result, parts: Iterable[str] = PARTS, undecided: Undecided | None = None
) -> tuple[Comparison, ...]:
    """Compare what a planned step made with what an eager one did, without what is undecided."""
    left_out = undecided or {}
    return tuple(
        compared_part(part, *(_without(made, left_out.get(part)) for made in (eager[part], getattr(planned, part))))
        for part in parts
    )


def undecided_in(eager: StoredResult, again: Result) -> Undecided:
    """Return what a second eager step makes differently: sums whose order is left to chance."""
    return {
        part: frozenset(name for name, each in eager[part].items() if difference(each, getattr(again, part).get(name)))
        for part in PARTS
    }


def _without(made: Mapping[str, Any], names: frozenset[str] | None) -> Mapping[str, Any]:
    return {name: each for name, each in made.items() if name not in names} if names else made


def compared_part(part: str, eager: Mapping[str, AnyTensor], planned: Mapping[str, AnyTensor]) -> Comparison:
    """Compare tensors of the same names; one that is missing differs."""
    names = dict.fromkeys((*eager, *planned))
    differences = {name: difference(eager.get(name), planned.get(name)) for name in names}
    worst = max(differences, key=lambda name: differences[name] or 0.0, default="")
    unequal = {name: each for name, each in differences.items() if each}
    noise = 0.0
    if part == "gradients" and unequal:
        noise = _ONE_FLOAT * max(map(_largest, eager.values()), default=0.0)
    beyond = [each for name, each in unequal.items() if not _is_noise(each, eager.get(name), noise)]
    return Comparison(
        part=part,
        compared=len(names),
        equal=sum(each is None for each in differences.values()),
        largest_difference=differences.get(worst) or 0.0,
        worst=worst,
        beyond_rounding=max(beyond, default=0.0),
    )


def difference(eager: AnyTensor | None, planned: AnyTensor | None) -> float | None:
    """None if equal bit for bit, NaN where NaN is; infinite if one is missing or of another kind."""
    if eager is None or planned is None or (eager.shape, eager.dtype) != (planned.shape, planned.dtype):
        return math.inf
    pairs = zip(chunks_of(eager), chunks_of(planned), strict=True)
    if all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs):
        return None
    largest = _largest(eager)
    pairs = zip(chunks_of(eager), chunks_of(planned), strict=True)
    absolute = max(float((one.double() - other.double()).abs().nan_to_num(nan=math.inf).max()) for one, other in pairs)
    return absolute / largest if largest else absolute


def _largest(tensor: AnyTensor) -> float:
    """The largest finite number."""
    return max((_largest_in(chunk) for chunk in chunks_of(tensor)), default=0.0)


def _largest_in(chunk: torch.Tensor) -> float:
    numbers = chunk.double().abs()
    return float(numbers.where(numbers.isfinite(), 0.0).max()) if chunk.numel() else 0.0


def _is_noise(difference: float, eager: AnyTensor | None, noise: float) -> bool:
    """Return whether a relative difference is a tiny one: the gradient of a key's bias is zero but for rounding."""
    return eager is not None and difference * (_largest(eager) or 1.0) <= noise
