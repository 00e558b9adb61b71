"""The processes a sharded model lives on, and what they tell each other.

Note [One decides]
    Only the first rank plans; the others get the text of its plan, or the error it ended with. So all ranks go on
    with one plan or stop with one reason. What is sent is text and numbers, never pickled objects.

Note [Along each dimension]
    A mesh may have several dimensions, each with a board of its own. What its first rank has is told along each of
    them in turn: after the last, every rank has got it from one that had.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from memfit.distributed.board import PATIENCE_S, Board, answer_of, value_of
from memfit.errors import InvalidModel, MemfitError, RankError


class MeshRanks:
    """All ranks that hold a part of one model."""

    def __init__(self, model: nn.Module, *, patience_s: float = PATIENCE_S) -> None:
        meshes = (getattr(each, "device_mesh", None) for each in model.parameters())
        self._mesh = next(mesh for mesh in meshes if mesh is not None)
        self._boards = [
            Board(self._mesh.get_group(dimension), patience_s=patience_s) for dimension in range(self._mesh.ndim)
        ]

    @property
    def is_first(self) -> bool:
        return all(place == 0 for place in self._mesh.get_coordinate() or ())

    def from_first(self, make: Callable[[], str]) -> str:
        """What `make` returns on the first rank, on all of them; what it raises is raised on all."""
        failures: list[BaseException] = []

        def made() -> str:
            try:
                return make()
            except BaseException as error:
                failures.append(error)
                if isinstance(error, Exception):
                    raise
                raise RankError("the first rank was interrupted while it planned for all; no rank goes on") from error

        word = answer_of(made) if self.is_first else ""
        try:
            return value_of(self._decided(word, _first))
        except MemfitError as error:
            if failures:
                raise failures[0] from error  # as it was, where it was
            raise

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        return int(self._decided(str(number), _largest))

    def check_equal(self, described: str, *, what: str) -> None:
        """Refuse on all ranks if they do not have the same."""
        digest = int.from_bytes(hashlib.sha256(described.encode()).digest())
        if self.largest(digest) != -self.largest(-digest):
            raise InvalidModel(
                f"ranks differ in {what}, so one plan cannot serve them; build the same model with the same options "
                "and versions, and give samples of the same shapes, on every rank"
            )

    def _decided(self, word: str, decide: Callable[[Sequence[str]], str]) -> str:
        """See Note [Along each dimension]."""
        for board in self._boards:
            word = board.decided(word, decide)
        return word

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Give signs of life meanwhile."""
        with contextlib.ExitStack() as stack:
            for board in self._boards:
                stack.enter_context(board.busy())
            yield


def _first(words: Sequence[str]) -> str:
    return next((word for word in words if word), "")  # the others have nothing to say


def _largest(words: Sequence[str]) -> str:
    return str(max(map(int, words)))
