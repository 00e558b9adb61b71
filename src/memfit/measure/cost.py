"""What one operator call costs, measured once per signature and remembered on disk."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memfit.files import cache_folder, read_checked, write_checked

log = logging.getLogger(__name__)

_LABEL = '{"format": "memfit.costs", "version": 5} '


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCost:
    """What one call of an operator takes."""

    workspace_bytes: int  # allocated inside and gone when it returns
    output_bytes: tuple[int, ...]  # of the storages it makes, in order
    time_us: float | None = None  # None: not timed
    is_bound: bool = False  # it was not run: the workspace is bounded from above, and never kept on disk


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What one call of an operator was seen to do in a training step."""

    fresh_us: float | None = None  # of a run into new memory; None: no step had one
    in_place_us: float | None = None  # of a run that overwrites its first argument
    is_equal: bool | None = None  # whether a variant made the bits of what it stands for; None: not compared


_Costs = tuple[Mapping[str, OperatorCost], Mapping[str, StepCost]]  # of calls alone, and in steps
_READ: dict[Path, tuple[tuple[int, ...], _Costs]] = {}  # what was read last, and what the file was like then


class CostCache:
    """Costs by signature in one file per device and torch version.

    A file that is not what was written is not an error: it is measured again and replaced.
    """

    def __init__(self, device: str, folder: Path | None = None) -> None:
        self.path = (folder or cache_folder()) / f"{_file_name(device)}.json"

    def load(self) -> Mapping[str, OperatorCost]:
        """Return what calls took alone."""
        return self._load()[0]

    def load_steps(self) -> Mapping[str, StepCost]:
        """Return what calls took in steps."""
        return self._load()[1]

    def _load(self) -> _Costs:
        """Read the file, unless this process has read it as it is."""
        try:
            stamp = _stamp(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return {}, {}
        except OSError as error:
            log.warning("the cost cache %s cannot be read (%s); measuring again", self.path.name, error)
            return {}, {}
        stamped = _READ.get(self.path)
        if stamped is None or stamped[0] != stamp:
            _READ[self.path] = stamped = stamp, _parsed(read_checked(self.path, label=_LABEL))
        return stamped[1]

    def save(self, costs: Mapping[str, OperatorCost]) -> None:
        """Add to what is on disk. Of two processes that save at once, one may have to measure again."""
        alone, steps = self._load()
        self._write({**alone, **costs}, steps)

    def save_steps(self, costs: Mapping[str, StepCost]) -> None:
        """Add what steps have shown to what is on disk."""
        alone, steps = self._load()
        self._write(alone, {**steps, **costs})

    def _write(self, alone: Mapping[str, OperatorCost], steps: Mapping[str, StepCost]) -> None:
        content = {
            "costs": {signature: _fields(alone[signature]) for signature in sorted(alone)},
            "steps": {signature: dataclasses.asdict(steps[signature]) for signature in sorted(steps)},
        }
        try:
            write_checked(self.path, content, label=_LABEL)
        except OSError as error:
            log.warning("the cost cache could not be written (%s)", error)


def _stamp(path: Path) -> tuple[int, ...]:
    """Tell one state of a file from another; a file that is replaced is another."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _parsed(content: Any) -> _Costs:
    if content is None:
        return {}, {}
    alone = {signature: _cost(fields) for signature, fields in content["costs"].items()}
    return alone, {signature: StepCost(**fields) for signature, fields in content["steps"].items()}


def _fields(cost: OperatorCost) -> dict[str, Any]:
    return {
        "workspace_bytes": cost.workspace_bytes,
        "output_bytes": list(cost.output_bytes),
        "time_us": cost.time_us,
    }


def _cost(fields: dict[str, Any]) -> OperatorCost:
    return OperatorCost(**fields | {"output_bytes": tuple(fields["output_bytes"])})


def _file_name(device: str) -> str:
    """Costs depend on the device, the build of torch and the number of threads."""
    words = (device, f"torch-{torch.__version__}", f"{torch.get_num_threads()}-threads")
    return "_".join("".join(c if c.isalnum() or c in ".-+" else "-" for c in word) for word in words)
