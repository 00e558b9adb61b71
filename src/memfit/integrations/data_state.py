"""Put back what fetching a batch moves on in loaders and datasets, so that training begins with the same batches.

Generators of their own, attributes and most iterators can be put back. A stream cannot: a generator function goes on
where it stood. Who has one gives a batch by itself.
"""

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from memfit.capture.keepers import NotPutBack, PutBack, of_attributes, put_back_of
from memfit.errors import InvalidInput

_DEEPEST = 8
_LARGEST = 200  # of containers that are looked into: samples have no state
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType)
_LEAVES = (str, bytes, int, float, complex, torch.Tensor, *_CODE, _BaseDataLoaderIter)


@contextlib.contextmanager
def data_put_back(*sources: Any) -> Iterator[None]:
    """Put loaders and datasets back at the end; InvalidInput if that cannot be done."""
    found = [*_keepers(sources)]
    try:
        yield
    finally:
        failed = [name for put_back in found if (name := _put_back(put_back))]
    if failed:
        raise InvalidInput(
            f"the first batch was taken from a stream ({failed[0]}), to see what a step takes, and cannot be put back; "
            "give a batch by itself (MemfitCallback(batch=...) for Lightning, a dataset with places for the Trainer), "
            "and make the stream anew"
        )


def _put_back(put_back: PutBack) -> str:
    try:
        put_back()
    except NotPutBack as error:
        return str(error)
    return ""


def _keepers(sources: Sequence[Any]) -> Iterator[PutBack]:
    seen: set[int] = set()
    waiting = [(each, 0) for each in sources]
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or isinstance(value, _LEAVES) or value is None:
            continue
        seen.add(id(value))
        keeper = None if isinstance(value, dict | list | set) else put_back_of(value)
        if keeper is not None:
            yield keeper
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield of_attributes(attributes)
        if depth < _DEEPEST:
            waiting += [(each, depth + 1) for each in (*_inside(value), *_inside(attributes))]


def _inside(value: Any) -> list[Any]:
    """Return the content of a small container."""
    if not isinstance(value, list | tuple | Mapping | Set) or len(value) > _LARGEST:
        return []
    return [*value.values()] if isinstance(value, Mapping) else [*value]
