"""Checkpoints of a whole training run in one file: tensors as safetensors, the rest as JSON in its header.

Note [One file]
    A checkpoint is replaced in one move when it is complete and on the disk, so a run that is killed at any moment
    leaves the old one or the new one. Tensors are written and read one by one, from and to where they live.
"""

import json
from pathlib import Path
from typing import Any

import torch

from memfit.errors import InvalidFile
from memfit.step.tensor_file import TensorFile, write_tensors
from memfit.step.tree import copied, put_together, take_apart

FORMAT = "memfit.step"
VERSION = 1


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write the state of a run, see Note [One file]."""
    tree, tensors = take_apart(state)
    write_tensors(path, tensors, {"format": FORMAT, "version": str(VERSION), "state": json.dumps(tree)})


class Checkpoint:
    """A checkpoint that is read piece by piece."""

    def __init__(self, path: Path) -> None:
        self._file = TensorFile(path)
        metadata = self._file.metadata
        if metadata.get("format") != FORMAT:
            raise InvalidFile(f"{path} is not a checkpoint of a training step; give one that Step.save wrote")
        if metadata.get("version") != str(VERSION):
            raise InvalidFile(
                f"{path} is a checkpoint of version {metadata.get('version')}, this memfit reads {VERSION}; use the "
                "version that wrote it"
            )
        self._tree = json.loads(metadata["state"])

    def state(self) -> dict[str, Any]:
        """The state of the run, its tensors not read yet: `Stored` stands in their places."""
        state: dict[str, Any] = put_together(self._tree, lambda name: Stored(self._file, name))  # type: ignore[arg-type, return-value]
        return state


class Stored:
    """A tensor of a checkpoint that is read when it is wanted."""

    def __init__(self, file: TensorFile, name: str) -> None:
        self._file = file
        self._name = name
        self.shape = file.entries[name].shape
        self.dtype = file.entries[name].dtype

    def copy_into(self, tensor: torch.Tensor) -> None:
        self._file.copy_into(self._name, tensor)

    def read(self) -> torch.Tensor:
        return self._file.tensor(self._name)


def value_of(found: Any) -> Any:
    """What a state holds: a tensor of its own, or the plain value."""
    if isinstance(found, Stored):
        return found.read()
    return copied(found) if isinstance(found, torch.Tensor) else found
