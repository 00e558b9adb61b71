"""Everything that steps of a model may change, so that it can be put back.

Note [Written parameters]
    Few forwards write into parameters (a momentum encoder does), and a copy of all of them may be more than there is
    room for. So in the first step of a model they are in a file, with all tensors that its code reaches. Those that
    differ afterwards are known from then on and copied before every step; of the others the counters of writes are
    looked at.
"""

import contextlib
import dataclasses
import functools
import gc
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from memfit.capture.keepers import NotPutBack, PutBack, of_attributes, of_cell, of_class, of_global, put_back_of
from memfit.capture.reachable import Reachable, homes_of
from memfit.capture.sample import Sample
from memfit.capture.spilled import SpillFile, is_plain
from memfit.collecting import collected_later
from memfit.errors import CaptureError
from memfit.tensors import tensors_in

Keep = Callable[[torch.Tensor], Callable[[], torch.Tensor]]  # remembers a tensor, and returns what gives it back

_CACHES = (functools._lru_cache_wrapper,)
_CONTAINERS = (dict, list, set, deque)
_WRITTEN: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # by model: what its first step wrote into


def copied(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Remember a tensor in memory."""
    copy = tensor.detach().clone()
    return lambda: copy


@contextlib.contextmanager
def draws_put_back(model: nn.Module, sample: Sample) -> Iterator[Callable[[], None]]:
    """Put back generators, iterators and arrays, which a forward moves on also where tensors have no memory.

    Yield what clears caches of functions (`functools.lru_cache`) that were filled since, with tensors of a trace maybe.
    """
    with collected_later():
        things = [thing for _, thing in Reachable(_roots(model, sample)).things.values()]
        found = [put_back_of(each) for each in things if not isinstance(each, _CONTAINERS)]
    misses = [(each, each.cache_info().misses) for each in things if isinstance(each, _CACHES)]

    def clear_caches() -> None:
        for cache, before in misses:
            if cache.cache_info().misses != before and _holds_tensors(cache):
                cache.cache_clear()

    try:
        yield clear_caches
    finally:
        clear_caches()
        _check_put_back(_put_all_back([each for each in found if each is not None]))


def _put_all_back(found: Sequence[PutBack]) -> list[str]:
    """Put everything back; the types of iterators for which that cannot be done are returned."""
    failed = []
    for put_back in found:
        try:
            put_back()
        except NotPutBack as error:
            failed.append(str(error))
    return failed


def _check_put_back(failed: list[str]) -> None:
    if failed:
        raise CaptureError(
            f"the forward moves on an iterator ({failed[0]}), which a step that was run to plan has moved and nothing "
            "can move back; hold a list and a place in it, or a buffer, and make the iterator anew before you train"
        )


@contextlib.contextmanager
def python_put_back(model: nn.Module, sample: Sample, code: Sequence[Any]) -> Iterator[None]:
    """Put back all but tensors that a model and `code` reach, for a run in which these have no memory."""
    with collected_later():
        found = [*_putting_back(Reachable([*_roots(model, sample), *(("a hook", each) for each in code)]))]
    try:
        yield
    finally:
        for put_back in found:
            put_back()


class State:
    """Remember what a model, a sample and the code behind the model hold, and restore it once."""

    def __init__(self, model: nn.Module, sample: Sample, *, keep: Keep) -> None:
        self._model = model
        with collected_later():  # many small things are made
            reached = Reachable(_roots(model, sample))
            self._put_back = [*_putting_back(reached)]
        self._file = None if model in _WRITTEN else SpillFile()
        try:
            self._tensors = [*self._kept(reached, sample, keep)]
        except BaseException:
            self._close()
            raise

    def restore(self) -> None:
        """Put everything back; CaptureError names a tensor for which that cannot be done."""
        not_put_back = _put_all_back(self._put_back)
        with torch.no_grad():
            written = {each.path for each in self._tensors if each.put_back()}
        if self._file is not None:
            _WRITTEN[self._model] = written
        self._close()
        lost = next((each for each in self._tensors if each.is_lost()), None)
        if lost is not None:
            raise CaptureError(
                f"the forward changes {lost.path}, where it changed nothing the first time, so that it cannot be put "
                "back after a step that is run to plan; keep it in a buffer"
            )
        _check_put_back(not_put_back)

    def _kept(self, reached: Reachable, sample: Sample, keep: Keep) -> Iterator["_Tensor"]:
        """Remember tensors, see Note [Written parameters]; buffers and attributes of modules always."""
        own = {id(each) for each in (*self._model.parameters(), *sample.tensors())}
        parts = [*self._model.modules()]
        always = {id(each) for part in parts for each in (*part.buffers(recurse=False), *vars(part).values())} - own
        known = _WRITTEN.get(self._model, ())
        for path, thing in reached.things.values():
            if not isinstance(thing, torch.Tensor) or not (is_plain(thing) or id(thing) in always):
                continue
            content = None
            if id(thing) in always or path in known:
                content = keep(thing)
            elif self._file is not None:
                content = self._file.keep(thing)
            yield _Tensor.of(path, thing, content, with_gradient=id(thing) not in own)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tensor:
    path: str
    tensor: torch.Tensor
    place: torch.Tensor | None  # the same memory
    content: Callable[[], torch.Tensor] | None
    version: int
    gradient: torch.Tensor | None
    with_gradient: bool

    @classmethod
    def of(
        cls, path: str, tensor: torch.Tensor, content: Callable[[], torch.Tensor] | None, *, with_gradient: bool
    ) -> "_Tensor":
        """Remember a tensor, and take its gradient away."""
        collects = with_gradient and tensor.requires_grad and tensor.is_leaf
        gradient = tensor.grad if collects else None
        if gradient is not None:
            tensor.grad = None
        return cls(
            path=path,
            tensor=tensor,
            place=tensor.data if is_plain(tensor) else None,
            content=content,
            version=_version_of(tensor),
            gradient=gradient,
            with_gradient=collects,
        )

    def put_back(self) -> bool:
        """Put back where it lies, what it holds and its gradient; return whether one of the first two was another."""
        if self.with_gradient:
            self.tensor.grad = self.gradient
        moved = False
        if self.place is not None and not _lie_alike(self.tensor, self.place):
            moved, self.tensor.data = True, self.place
        if self.content is None:
            return moved
        before = self.content()
        if not _was_changed(self.tensor, before):  # not all can be written to: expanded ones, those of inference
            return moved
        self.tensor.copy_(before)
        return True

    def is_lost(self) -> bool:
        """Return whether something was written that is not known any more."""
        return self.content is None and _version_of(self.tensor) != self.version


def _roots(model: nn.Module, sample: Sample) -> list[tuple[str, object]]:
    generators: list[object] = [random._inst]
    if "numpy" in sys.modules:
        generators.append(sys.modules["numpy"].random.mtrand._rand)
    given = (("an argument", each) for each in (sample.args, dict(sample.kwargs)))
    return [*given, *(("a generator", each) for each in generators), ("", model)]


def _holds_tensors(cache: Any) -> bool:
    """Return whether a cache of a function has tensors among its results; others say once what is to be said once."""
    held = gc.get_referents(cache)
    return bool(tensors_in([*held, *(value for each in held if type(each) is dict for value in each.values())]))


def _putting_back(reached: Reachable) -> Iterator[PutBack]:
    """Yield what puts back everything but tensors; attributes first, which hold the rest."""
    yield from (of_class(each) for each in reached.classes)
    yield from (of_global(home, name) for _, home, name in reached.globals.values())
    yield from map(of_cell, reached.cells.values())
    for _, thing in [*reached.things.values()]:
        put_back = put_back_of(thing)
        if put_back is not None:
            yield put_back
        if reached.has_attributes(thing):
            yield from map(of_attributes, homes_of(thing))


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape or one.stride() != other.stride():
        return False
    return one.data_ptr() == other.data_ptr()


def _was_changed(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Also where that cannot be told, of tensors without memory."""
    try:
        return not torch.equal(tensor, before)
    except RuntimeError:
        return True


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
