"""How a training step is run: one frozen record of every technique."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from memfit.errors import InvalidInput

PRECISIONS = ("fp16", "bf16", "pure-bf16")
UPDATES = ("after", "inside")
TIERS = ("host", "disk")
PERMISSIONS = {
    "batch-statistics": "micro-batches of a model whose BatchNorm then sees fewer samples: other numbers",
    "unknown-optimizer": "an optimizer that is not known to update every parameter by itself: you vouch for it",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPolicy:
    """Which techniques a step uses. `Step` makes one from its keywords; whoever chooses for the user makes one too."""

    micro_batches: int = 1  # pieces that every batch is cut into
    accumulate: int = 1  # batches whose gradients one update uses
    precision: str | None = None  # "fp16", "bf16" (autocast) or "pure-bf16" (parameters and optimizer state too)
    clip_norm: float | None = None  # the largest norm of all gradients together
    update: str = "after"  # the backward pass, or "inside" it
    state_tier: str | None = None  # where the optimizer's state lives: None (beside the parameters), "host" or "disk"
    directory: str | os.PathLike[str] | None = None  # of the state, if it is on disk
    allow: tuple[str, ...] = ()  # see PERMISSIONS

    def __post_init__(self) -> None:
        _check_count("micro_batches", self.micro_batches)
        _check_count("accumulate", self.accumulate)
        _check_choice("precision", self.precision, PRECISIONS)
        _check_choice("update", self.update, UPDATES, required=True)
        _check_choice("state_tier", self.state_tier, TIERS)
        _check_permissions(self.allow)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InvalidInput(f"clip_norm is a positive number, {self.clip_norm!r} was given")
        self._check_directory()
        self._check_update()

    def _check_directory(self) -> None:
        if self.state_tier == "disk" and self.directory is None:
            raise InvalidInput(
                'state_tier="disk" needs a directory on the disk to use; give directory="..." (not one of a file '
                "system in memory)"
            )
        if self.state_tier != "disk" and self.directory is not None:
            raise InvalidInput('directory= is where state_tier="disk" puts the optimizer state; give both or neither')

    def _check_update(self) -> None:
        if self.update == "inside" and self.clip_norm is not None:
            raise InvalidInput(
                "clip_norm needs the norm of all gradients before the first parameter changes, and an update inside "
                'the backward pass never has them all; use update="after", or leave clip_norm out'
            )
        if self.update == "inside" and self.precision == "fp16":
            raise InvalidInput(
                'precision="fp16" looks at all gradients before it decides to skip an update, and an update inside '
                'the backward pass never has them all; use precision="bf16", or update="after"'
            )

    @property
    def is_updated_in_parts(self) -> bool:
        """Whether the optimizer is run parameter by parameter, see Note [Parts] in `parts.py`."""
        return self.update == "inside" or self.state_tier is not None or self.precision == "pure-bf16"

    def to_json(self) -> dict[str, Any]:
        """As numbers and words, for a checkpoint or a report."""
        fields: Mapping[str, Any] = dataclasses.asdict(self)
        return {**fields, "directory": None if self.directory is None else os.fspath(self.directory)}


def _check_count(name: str, count: Any) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InvalidInput(f"{name} is a whole number from 1, {count!r} was given")


def _check_choice(name: str, choice: Any, known: tuple[str, ...], *, required: bool = False) -> None:
    if (choice is None and not required) or choice in known:
        return
    raise InvalidInput(f"{name} is one of {', '.join(map(repr, known))}, {choice!r} was given")


def _check_permissions(allow: Any) -> None:
    if isinstance(allow, str) or not all(each in PERMISSIONS for each in allow):
        known = "; ".join(f"{name!r} ({meaning})" for name, meaning in PERMISSIONS.items())
        raise InvalidInput(f"allow is a tuple of names, {allow!r} was given; known are {known}")
