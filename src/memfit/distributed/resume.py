"""Checkpoints of a data-parallel run: complete on all ranks, or not there.

Every rank has its own file, for it has generators of its own and maybe a disk of its own. A run that is killed may
leave the newest checkpoint on some ranks only. So two are kept, and a run goes on from the newest that every rank
has.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from memfit.distributed.agree import PATIENCE_S, is_several
from memfit.distributed.board import Board
from memfit.errors import InvalidFile
from memfit.step.step import Step

_KEPT = 2


def save(step: Step, directory: str | Path) -> Path:
    """Write this rank's part of a checkpoint; on every rank, after the same step. Older ones but one are removed."""
    rank, size = _place(None)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _name(step.position.batches, rank, size)
    step.save(path)
    for old in sorted(_numbers(folder, rank, size))[:-_KEPT]:
        (folder / _name(old, rank, size)).unlink(missing_ok=True)
    return path


def resume(step: Step, directory: str | Path, *, group: Any = None, patience: float = PATIENCE_S) -> int:
    """Go on from the newest checkpoint that all ranks have; how many batches were given until then, 0 if none."""
    rank, size = _place(group)
    folder = Path(directory)
    own = _numbers(folder, rank, size)
    number = max(own, default=0)
    if is_several(group):
        board = Board(group, patience_s=patience)
        number = int(board.decided(json.dumps(own), _newest_of_all))
    if number:
        step.load(folder / _name(number, rank, size))
    return number


def _newest_of_all(words: Sequence[str]) -> str:
    found = [set(json.loads(word)) for word in words]
    common = set.intersection(*found)
    without = [rank for rank, numbers in enumerate(found) if not numbers]
    if not common and len(without) < len(found):
        raise InvalidFile(
            "there is no checkpoint that all ranks have"
            + (f": rank {without[0]} has none" if without else "")
            + "; give the directory of a run of as many ranks, or an empty one to begin anew"
        )
    return str(max(common, default=0))


def _place(group: Any) -> tuple[int, int]:
    if not is_several(group):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _name(number: int, rank: int, size: int) -> str:
    return f"step-{number:09d}.rank{rank}of{size}.safetensors"


def _numbers(folder: Path, rank: int, size: int) -> list[int]:
    suffix = f".rank{rank}of{size}.safetensors"
    names = [path.name.removesuffix(suffix).removeprefix("step-") for path in folder.glob(f"step-*{suffix}")]
    return sorted(int(name) for name in names if name.isdigit())
