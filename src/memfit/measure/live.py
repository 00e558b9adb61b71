"""Bytes that are live while a program runs on tensors without memory."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.measure.cost import OperatorCost
from memfit.measure.signature import encode
from memfit.tensors import tensors_in


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operators make until they are gone.

    With `notes_calls` the signatures of all calls are noted in `calls`; with `costs` of them, what operators allocate
    inside counts towards the peak.
    """

    def __init__(self, *, notes_calls: bool = False) -> None:
        super().__init__()
        self.calls: set[str] = set()
        self.costs: dict[str, OperatorCost] = {}
        self._notes_calls = notes_calls
        self.peak_bytes = 0
        self.live_bytes = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def start_anew(self) -> None:
        """Look for the peak from here on."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            self._seen.add(tensor.untyped_storage())
        result = func(*args, **kwargs or {})
        fresh = {id(each): each for each in map(torch.Tensor.untyped_storage, tensors_in(result))}.values()
        self._follow([storage for storage in fresh if storage not in self._seen], self._noted(func, args, kwargs or {}))
        return result

    def _noted(self, func: Any, args: Any, kwargs: Any) -> OperatorCost | None:
        if not self._notes_calls or not str(func).startswith("aten."):
            return None
        try:
            call = encode(func, args, kwargs)
        except (KeyError, TypeError, ValueError):
            return None  # an argument that a signature cannot describe: its cost stays unknown
        self.calls.add(call)
        return self.costs.get(call)

    def _follow(self, storages: list[Any], cost: OperatorCost | None) -> None:
        sizes = [storage.nbytes() for storage in storages]
        if cost is not None and len(cost.output_bytes) == len(sizes):
            sizes = list(cost.output_bytes)  # a number may come in the storage of a whole tensor
        for storage, size_bytes in zip(storages, sizes, strict=True):
            self._seen.add(storage)
            self.live_bytes += size_bytes
            weakref.finalize(storage, self._release, size_bytes)
        inside_bytes = 0 if cost is None else cost.workspace_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + inside_bytes)

    def _release(self, size_bytes: int) -> None:
        self.live_bytes -= size_bytes


class AnsweredQuestions(TorchDispatchMode):
    """Answers questions about values (a step count) with 2: only sizes matter, and 1 would divide by zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 2
        return func(*args, **kwargs or {})
