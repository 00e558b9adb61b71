"""The processes a sharded model lives on, and what they tell each other.

Note [One decides]
    Only the first rank plans; the others get the text of its plan, or the error it ended with. So all ranks go on
    with one plan or stop with one reason. What is sent is text and numbers, never pickled objects.

Note [Along each dimension]
    A mesh may have several dimensions. What its first rank has is sent along each of them in turn: after the last,
    every rank has got it from one that had.
"""

import hashlib
import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from memfit import errors
from memfit.errors import ExecutionError, InfeasibleBudget, InvalidModel, MemfitError, first_line


class MeshRanks:
    """All ranks that hold a part of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._mesh = next(mesh for mesh in (getattr(each, "device_mesh", None) for each in model.parameters()) if mesh)
        self._groups = [self._mesh.get_group(dimension) for dimension in range(self._mesh.ndim)]
        self._device = self._mesh.device_type

    @property
    def is_first(self) -> bool:
        return all(place == 0 for place in self._mesh.get_coordinate() or ())

    def from_first(self, make: Callable[[], str]) -> str:
        """What `make` returns on the first rank, on all of them; what it raises is raised on all."""
        failure: BaseException | None = None
        message = ""
        if self.is_first:
            try:
                message = json.dumps({"made": make()})
            except BaseException as error:  # sent on before it is raised again, see Note [One decides]
                failure = error
                message = json.dumps(_described(error))
        message = self._broadcast(message)
        if failure is not None:
            raise failure
        content = json.loads(message)
        if "made" in content:
            return str(content["made"])
        raise _error_of(content)

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        value = torch.tensor([number], dtype=torch.int64, device=self._device)
        for group in self._groups:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
        return int(value.item())

    def check_equal(self, described: str, *, what: str) -> None:
        """Refuse on all ranks if they do not have the same."""
        number = int.from_bytes(hashlib.sha256(described.encode()).digest()[:7])
        if self.largest(number) != -self.largest(-number):
            raise InvalidModel(
                f"ranks differ in {what}, so one plan cannot serve them; build the same model with the same options "
                "and versions, and give samples of the same shapes, on every rank"
            )

    def _broadcast(self, message: str) -> str:
        content = message.encode()
        for group in self._groups:
            length = torch.tensor([len(content)], dtype=torch.int64, device=self._device)
            dist.broadcast(length, group_src=0, group=group)
            text = torch.zeros(int(length.item()), dtype=torch.uint8, device=self._device)
            if dist.get_rank(group) == 0 and content:
                text.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            dist.broadcast(text, group_src=0, group=group)
            content = bytes(text.cpu().numpy())
        return content.decode()


def _described(error: BaseException) -> dict[str, object]:
    numbers = {}
    if isinstance(error, InfeasibleBudget):
        numbers = {"smallest_bytes": error.smallest_bytes, "floor_bytes": error.floor_bytes}
    return {"error": type(error).__name__, "message": str(error), "numbers": numbers}


def _error_of(content: dict[str, object]) -> MemfitError:
    """The error of the first rank; one that is not ours is named."""
    kind = getattr(errors, str(content["error"]), None)
    message = str(content["message"])
    if isinstance(kind, type) and issubclass(kind, MemfitError):
        numbers = content["numbers"]
        assert isinstance(numbers, dict)
        return kind(message, **numbers)
    reason = first_line(Exception(message))
    return ExecutionError(f"planning failed on the first rank ({content['error']}: {reason}); its own message says why")
