"""What one operator call costs, measured once per signature and remembered on disk."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memfit.files import cache_folder, write_atomically

log = logging.getLogger(__name__)

_FORMAT = "memfit.costs"
_VERSION = 4


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

    A file that cannot be read is not an error: it is measured again and replaced.
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
            stamped = _READ.get(self.path)
            if stamped is None or stamped[0] != stamp:
                _READ[self.path] = stamped = stamp, _parsed(self.path.read_text(encoding="utf-8"))
            return stamped[1]
        except FileNotFoundError:
            return {}, {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            log.warning("the cost cache %s is damaged (%s); measuring again", self.path.name, error)
            return {}, {}

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
            "format": _FORMAT,
            "version": _VERSION,
            "costs": {signature: _fields(alone[signature]) for signature in sorted(alone)},
            "steps": {signature: dataclasses.asdict(steps[signature]) for signature in sorted(steps)},
        }
        try:
            write_atomically(self.path, json.dumps(content))
        except OSError as error:
            log.warning("the cost cache could not be written (%s)", error)


def _stamp(path: Path) -> tuple[int, ...]:
    """Tell one state of a file from another; a file that is replaced is another."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _parsed(text: str) -> _Costs:
    content = json.loads(text)
    if (content["format"], content["version"]) != (_FORMAT, _VERSION):
        raise ValueError("another format or version")
    alone = {signature: _cost(fields) for signature, fields in content["costs"].items()}
    return alone, {signature: _step_cost(fields) for signature, fields in content["steps"].items()}


def _fields(cost: OperatorCost) -> dict[str, Any]:
    return {
        "workspace_bytes": cost.workspace_bytes,
        "output_bytes": list(cost.output_bytes),
        "time_us": cost.time_us,
    }


def _cost(fields: dict[str, Any]) -> OperatorCost:
    time_us = fields["time_us"]
    if fields["workspace_bytes"] < 0 or any(size < 0 for size in fields["output_bytes"]):
        raise ValueError("a negative size")
    return OperatorCost(
        workspace_bytes=int(fields["workspace_bytes"]),
        output_bytes=tuple(int(size) for size in fields["output_bytes"]),
        time_us=None if time_us is None else float(time_us),
    )


def _step_cost(fields: dict[str, Any]) -> StepCost:
    times = [None if fields[name] is None else float(fields[name]) for name in ("fresh_us", "in_place_us")]
    if any(time_us is not None and not time_us >= 0 for time_us in times):
        raise ValueError("a negative time")
    is_equal = fields["is_equal"]
    if is_equal is not None and not isinstance(is_equal, bool):
        raise ValueError("an answer that is neither yes nor no")
    return StepCost(fresh_us=times[0], in_place_us=times[1], is_equal=is_equal)


def _file_name(device: str) -> str:
    """Costs depend on the device, the build of torch and the number of threads."""
    words = (device, f"torch-{torch.__version__}", f"{torch.get_num_threads()}-threads")
    return "_".join("".join(c if c.isalnum() or c in ".-+" else "-" for c in word) for word in words)
