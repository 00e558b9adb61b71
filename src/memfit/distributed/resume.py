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

from memfit.distributed.agree import is_several
from memfit.distributed.board import PATIENCE_S, Board
from memfit.errors import InvalidFile, first_line
from memfit.step.step import Step

_KEPT = 2


def save(step: Step, directory: str | Path, *, group: Any = None) -> Path:
    """Write this rank's part of a checkpoint; on every rank, after the same step. Older ones but one are removed."""
    rank, size = _place(group)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    number = step.position.batches
    later = [each for each in _numbers(folder, rank, size) if each > number]
    if later:
        raise InvalidFile(
            f"{folder} has a checkpoint after {later[-1]} batches, this run has done {number}: it is another run's; go "
            "on from it with memfit.distributed.resume, or give an empty directory"
        )
    path = folder / _name(number, rank, size)
    step.save(path)
    for old in _numbers(folder, rank, size)[:-_KEPT]:
        (folder / _name(old, rank, size)).unlink(missing_ok=True)
    return path


def resume(step: Step, directory: str | Path, *, group: Any = None, patience: float = PATIENCE_S) -> int:
    """Go on from the newest checkpoint that all ranks have; how many batches were given until then, 0 if none.

    Where one rank cannot read its part, all raise. Newer ones, which not all ranks have, are removed.
    """
    rank, size = _place(group)
    folder = Path(directory)
    own = _numbers(folder, rank, size)
    found = json.dumps({"own": own, "sizes": _sizes(folder)})
    board = Board(group, patience_s=patience) if is_several(group) else None
    number = int(_newest_of_all([found]) if board is None else board.decided(found, _newest_of_all))
    failure = _failure(step, folder / _name(number, rank, size)) if number else None
    if board is not None:
        board.decided("" if failure is None else first_line(failure), _all_could_read)
    if failure is not None:
        raise failure
    for newer in own:
        if newer > number:
            (folder / _name(newer, rank, size)).unlink(missing_ok=True)
    return number


def _failure(step: Step, path: Path) -> Exception | None:
    """Load a checkpoint; the error, if it cannot be."""
    try:
        step.load(path)
    except Exception as error:  # whatever it is: the other ranks must not go on without this one
        return error
    return None


def _all_could_read(words: Sequence[str]) -> str:
    failed = [f"rank {rank}: {word}" for rank, word in enumerate(words) if word]
    if failed:
        raise InvalidFile(f"the checkpoint cannot be read on all ranks ({'; '.join(failed[:2])}); no rank goes on")
    return ""


def _newest_of_all(words: Sequence[str]) -> str:
    said = [json.loads(word) for word in words]
    found = [set(each["own"]) for each in said]
    sizes = sorted({size for each in said for size in each["sizes"]} - {len(words)})
    if not any(found) and sizes:
        raise InvalidFile(
            f"the checkpoints in the directory are those of a run of {sizes[0]} ranks, this one has {len(words)}; run "
            "on as many, or give an empty directory to begin anew"
        )
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


def _sizes(folder: Path) -> list[int]:
    """Of how many ranks the runs were whose checkpoints lie in a folder."""
    ends = {path.name.rpartition("of")[2].removesuffix(".safetensors") for path in folder.glob("step-*.rank*of*")}
    return sorted(int(end) for end in ends if end.isdigit())


def _numbers(folder: Path, rank: int, size: int) -> list[int]:
    suffix = f".rank{rank}of{size}.safetensors"
    names = [path.name.removesuffix(suffix).removeprefix("step-") for path in folder.glob(f"step-*{suffix}")]
    return sorted(int(name) for name in names if name.isdigit())
