"""Where the ranks of a process group leave word for each other.

Note [Words]
    Ranks agree through the store that they found each other by, not by collectives: it works the same on every
    backend and device, and the time limit of the process group, which is made for seconds of communication and not
    for minutes of planning, plays no part. Every rank gives a sign of life while it is busy. Who waits for a rank
    gives up only when that rank has given none for as long as `patience_s`.

Note [Nobody is left waiting]
    A decision has one form: every rank says something, the first rank decides, all hear the decision. A rank that has
    failed says so in place of what it was to say, so it takes part, and the first rank decides for all that it
    failed. If the deciding itself fails, that is the decision.
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from memfit import _torch, errors
from memfit.errors import MemfitError, RankError, first_line

PATIENCE_S = 600.0  # without a sign of life
_SIGN_OF_LIFE_S = 1.0
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.25  # between two looks, from short to long

_ROUNDS: Counter[str] = Counter()  # by group: how many decisions it has taken, the same on all its ranks


class Board:
    """Decisions of one group, see Note [Nobody is left waiting]."""

    def __init__(self, group: Any = None, *, patience_s: float = PATIENCE_S) -> None:
        group = group or dist.group.WORLD
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._name = group.group_name
        self._patience_s = patience_s
        self._store = dist.distributed_c10d.PrefixStore(f"memfit/{self._name}", _torch.default_store())

    def decided(self, word: str, decide: Callable[[Sequence[str]], str]) -> str:
        """What the first rank decides from the words of all. An error of the decision is raised on all ranks."""
        number = _ROUNDS[self._name]
        _ROUNDS[self._name] += 1
        with _explaining_loss_of_store():
            self._store.set(f"{number}/word/{self.rank}", word)
            if self.rank:
                answer = self._heard(f"{number}/decision", 0)
            else:
                answer = answer_of(lambda: decide(self._words(number)))
                self._store.set(f"{number}/decision", answer)
            self._clean(number)
        return value_of(answer)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Give signs of life while something takes long."""
        ended = threading.Event()

        def live() -> None:
            count = 0
            while not ended.wait(_SIGN_OF_LIFE_S if count else 0.0):
                count += 1
                try:
                    self._store.set(f"alive/{self.rank}", str(count))
                except RuntimeError:  # the store is gone; whoever asks it next will say so
                    return

        thread = threading.Thread(target=live, name="memfit signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _words(self, number: int) -> list[str]:
        return [self._heard(f"{number}/word/{rank}", rank) for rank in range(self.size)]

    def _heard(self, key: str, rank: int) -> str:
        """What a rank said; waits for it as long as it lives."""
        pause_s = _FIRST_LOOK_S
        sign, seen_s = "", time.monotonic()
        while not self._store.check([key]):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
            newer = self._sign_of(rank)
            if newer != sign:
                sign, seen_s = newer, time.monotonic()
            if time.monotonic() - seen_s > self._patience_s:
                raise RankError(
                    f"rank {rank} has given no sign of life for {self._patience_s:g} seconds while rank {self.rank} "
                    "waited for it to agree on a plan; look at what it does or whether it ended, or give more patience"
                )
        return self._store.get(key).decode()

    def _sign_of(self, rank: int) -> str:
        key = f"alive/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _clean(self, number: int) -> None:
        """Take away what was said before the last decision: all have heard it, or they had not come here."""
        if number:
            self._store.delete_key(f"{number - 1}/word/{self.rank}")
        if number > 1 and not self.rank:
            self._store.delete_key(f"{number - 2}/decision")


def answer_of(decide: Callable[[], str]) -> str:
    """The decision, or the error it ended with, as a word."""
    try:
        return json.dumps({"value": decide()})
    except MemfitError as error:
        fields = {name: value for name, value in vars(error).items() if isinstance(value, int | str)}
        return json.dumps({"error": type(error).__name__, "message": str(error), "fields": fields})
    except Exception as error:
        message = f"rank 0 failed while it decided for all: {type(error).__name__}: {first_line(error)}"
        return json.dumps({"error": "RankError", "message": message, "fields": {}})


def value_of(answer: str) -> str:
    """What `answer_of` was given, or the error of it."""
    data = json.loads(answer)
    if "value" in data:
        value: str = data["value"]
        return value
    error = getattr(errors, data["error"])
    raise error(data["message"], **data["fields"])


@contextlib.contextmanager
def _explaining_loss_of_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's own errors of communication are of this kind
        raise RankError(
            f"the ranks cannot hear each other any more ({first_line(error)}); the first rank or its launcher has "
            "probably ended: see its own error"
        ) from error
