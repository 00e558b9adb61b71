"""Batches of any shape, cut into pieces along the batch axis.

A batch is a tensor, or tensors in tuples, lists, mappings and dataclasses. Every tensor with an axis is cut along its
first one, and they must agree how long it is. Lists of strings of that length are cut too; everything else
(numbers, None, tensors without an axis) goes to every piece as it is.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memfit.errors import InvalidInput

Split = Callable[[Any, int], Sequence[Any]]  # a batch and a number of pieces


def row_count(batch: Any) -> int:
    """How many samples a batch holds."""
    lengths = {leaf.shape[0] for leaf in _leaves(batch) if leaf.dim()}
    if len(lengths) != 1:
        found = f"tensors of {_listed(lengths)} rows" if lengths else "no tensor with a batch axis"
        raise InvalidInput(
            f"the batch ({type(batch).__name__}) cannot be split: it holds {found}; give every tensor the samples in "
            "its first axis, or cut batches yourself with split=lambda batch, pieces: [...]"
        )
    return int(lengths.pop())


def split_batch(batch: Any, pieces: int) -> list[Any]:
    """Cut a batch into `pieces` whose sizes differ by one sample at most; the later ones are the smaller ones."""
    rows = row_count(batch)
    if rows < pieces:
        raise InvalidInput(
            f"a batch of {rows} samples cannot be cut into {pieces} micro-batches; use fewer micro_batches, or "
            "drop_last=True in the data loader if it is the rest of an epoch"
        )
    size, larger = divmod(rows, pieces)
    sizes = [size + (number < larger) for number in range(pieces)]
    starts = [0, *itertools.accumulate(sizes)]
    return [_cut(batch, slice(*ends), rows) for ends in itertools.pairwise(starts)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The same batch with every tensor changed."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    return _rebuilt(batch, lambda part: map_tensors(function, part))


def _cut(batch: Any, rows: slice, length: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[rows] if batch.dim() else batch
    if _is_text_column(batch, length):
        return batch[rows]
    return _rebuilt(batch, lambda part: _cut(part, rows, length))


def _is_text_column(batch: Any, length: int) -> bool:
    return (
        isinstance(batch, list | tuple)
        and len(batch) == length
        and all(isinstance(each, str | bytes) for each in batch)
    )


def _rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A container like the given one with its parts changed; what is no container stays as it is."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change(part) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(change(part) for part in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type) and not isinstance(batch, Mapping):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: change(getattr(batch, name)) for name in fields})
    if isinstance(batch, Mapping):
        return _mapping_like(batch, {key: change(part) for key, part in batch.items()})
    return batch


def _mapping_like(batch: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    try:
        maker: Any = type(batch)
        return maker(parts)
    except TypeError:
        return parts  # a mapping that is not made from a dict (a defaultdict); the loss reads it by its keys


def _leaves(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _leaves(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _leaves(part)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _leaves(getattr(batch, field.name))


def _listed(lengths: set[int]) -> str:
    return " and ".join(map(str, sorted(lengths)))
