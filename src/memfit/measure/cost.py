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
_VERSION = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCost:
    """What one call of an operator takes."""

    workspace_bytes: int  # allocated inside and gone when it returns
    output_bytes: tuple[int, ...]  # of the storages it makes, in order
    time_us: float | None = None  # None: not timed


class CostCache:
    """Costs by signature in one file per device and torch version.

    A file that cannot be read is not an error: it is measured again and replaced.
    """

    def __init__(self, device: str, folder: Path | None = None) -> None:
        self.path = (folder or cache_folder()) / f"{_file_name(device)}.json"

    def load(self) -> dict[str, OperatorCost]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if (content["format"], content["version"]) != (_FORMAT, _VERSION):
                raise ValueError("another format or version")
            return {signature: _cost(fields) for signature, fields in content["costs"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            log.warning("the cost cache %s is damaged (%s); measuring again", self.path.name, error)
            return {}

    def save(self, costs: Mapping[str, OperatorCost]) -> None:
        """Add to what is on disk. Of two processes that save at once, one may have to measure again."""
        merged = self.load() | dict(costs)
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "costs": {signature: dataclasses.asdict(merged[signature]) for signature in sorted(merged)},
        }
        try:
            write_atomically(self.path, json.dumps(content, indent=0))
        except OSError as error:
            log.warning("the cost cache could not be written (%s)", error)


def _cost(fields: dict[str, Any]) -> OperatorCost:
    time_us = fields["time_us"]
    if fields["workspace_bytes"] < 0 or any(size < 0 for size in fields["output_bytes"]):
        raise ValueError("a negative size")
    return OperatorCost(
        workspace_bytes=int(fields["workspace_bytes"]),
        output_bytes=tuple(int(size) for size in fields["output_bytes"]),
        time_us=None if time_us is None else float(time_us),
    )


def _file_name(device: str) -> str:
    """Costs depend on the device, the build of torch and the number of threads."""
    words = (device, f"torch-{torch.__version__}", f"{torch.get_num_threads()}-threads")
    return "_".join("".join(c if c.isalnum() or c in ".-+" else "-" for c in word) for word in words)
