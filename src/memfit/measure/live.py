"""Bytes that are live while a program runs on tensors without memory."""

import itertools
import weakref
from collections import deque
from collections.abc import Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.measure.cost import OperatorCost
from memfit.measure.signature import encode
from memfit.tensors import tensors_in

LARGE_NUMBER = 720_720_000
_NUMBERS = 2, LARGE_NUMBER  # 1 would divide by zero; the other is a multiple of all to 16 and of most round numbers


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operators make until they are gone.

    With `notes_calls` the signatures of all calls, or of those operators, are noted in `calls`; with `costs` of them,
    what operators allocate inside counts towards the peak. With `notes_levels` the live bytes after every change are
    noted in `levels_bytes`.
    """

    def __init__(self, *, notes_calls: bool | Collection[str] = False, notes_levels: bool = False) -> None:
        super().__init__()
        self.calls: set[str] = set()
        self.costs: dict[str, OperatorCost] = {}
        self.levels_bytes: list[int] = []
        self._notes_calls = notes_calls
        self._notes_levels = notes_levels
        self.peak_bytes = 0
        self.live_bytes = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.events: list[tuple[int, int]] = []  # with `notes_levels`: number of a storage, and bytes taken or released
        self._numbers = itertools.count()

    def start_anew(self) -> None:
        """Look for the peak, and note levels, from here on."""
        self.peak_bytes = self.live_bytes
        self.levels_bytes = [self.live_bytes]
        self.events = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            self._seen.add(tensor.untyped_storage())
        result = func(*args, **kwargs or {})
        fresh = {id(each): each for each in map(torch.Tensor.untyped_storage, tensors_in(result))}.values()
        self._follow([storage for storage in fresh if storage not in self._seen], self._noted(func, args, kwargs or {}))
        return result

    def _noted(self, func: Any, args: Any, kwargs: Any) -> OperatorCost | None:
        if not self._notes(func):
            return None
        try:
            call = encode(func, args, kwargs)
        except (KeyError, TypeError, ValueError):
            return None  # an argument that a signature cannot describe: its cost stays unknown
        self.calls.add(call)
        return self.costs.get(call)

    def _notes(self, func: Any) -> bool:
        if isinstance(self._notes_calls, bool):
            return self._notes_calls and str(func).startswith("aten.")
        return str(func.overloadpacket) in self._notes_calls

    def _follow(self, storages: list[Any], cost: OperatorCost | None) -> None:
        sizes = [storage.nbytes() for storage in storages]
        if cost is not None and len(cost.output_bytes) == len(sizes):
            sizes = list(cost.output_bytes)  # a number may come in the storage of a whole tensor
        for storage, size_bytes in zip(storages, sizes, strict=True):
            self._seen.add(storage)
            self.live_bytes += size_bytes
            number = next(self._numbers)
            self._note_event(number, size_bytes)
            weakref.finalize(storage, self._release, number, size_bytes)
        inside_bytes = 0 if cost is None else cost.workspace_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + inside_bytes)
        self._note_level(self.live_bytes + inside_bytes)
        if inside_bytes:
            self._note_level(self.live_bytes)

    def _release(self, number: int, size_bytes: int) -> None:
        self.live_bytes -= size_bytes
        self._note_event(number, -size_bytes)
        self._note_level(self.live_bytes)

    def _note_event(self, number: int, size_bytes: int) -> None:
        if self._notes_levels and size_bytes:
            self.events.append((number, size_bytes))

    def _note_level(self, level_bytes: int) -> None:
        if self._notes_levels:
            self.levels_bytes.append(level_bytes)


class AnsweredQuestions(TorchDispatchMode):
    """Answers questions about values (a step count) from `answers`, and with made-up ones when there are none left.

    Only sizes matter. In every round questions get other answers, see Note [Both branches] in `optimizer.py`.
    """

    def __init__(self, *, varies: bool = True) -> None:
        super().__init__()
        self.answers: deque[Any] = deque()
        self._varies = varies
        self._asked: set[bool] = set()  # whether for a yes or no
        self._round = 0

    @property
    def rounds(self) -> int:
        """Return how many rounds in a row give all answers, in all combinations, to what was asked so far."""
        if True in self._asked:
            return 4
        return 2 if self._asked else 1

    @property
    def is_varied(self) -> bool:
        """Whether this round has other answers than the first."""
        return self._varies and self._round > 0 and bool(self._asked)

    def next_round(self) -> None:
        """Answer otherwise from here on."""
        self._round += self._varies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.answers.popleft() if self.answers else self._made_up(args[0])
        return func(*args, **kwargs or {})

    def _made_up(self, asked: torch.Tensor) -> Any:
        is_number = asked.dtype is not torch.bool
        self._asked.add(not is_number)
        if is_number:
            return _NUMBERS[self._round % 2]
        return (self._round // 2 + self._round) % 2 == 0  # with each number both


class NotedAnswers(TorchDispatchMode):
    """Notes the answers to questions about values of real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default:
            self.answers.append(result)
        return result
