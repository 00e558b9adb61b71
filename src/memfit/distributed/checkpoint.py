"""Checkpoints of sharded runs: every rank writes its own shards, any number of ranks reads them.

Note [No pickle]
    `torch.distributed.checkpoint` does the sharding and resharding. Its own file format has a pickled index, so its
    safetensors form is used instead: each tensor's place in the whole is in the header of its file. That form holds
    tensors alone; everything else (learning rates, betas, positions) stands in one JSON file.

Note [Replaced in one move]
    Shards go into a new folder. When all ranks have written theirs, the first rank replaces `checkpoint.json`, which
    names the folder, and then removes what no longer is named. A run that is killed at any moment leaves the old
    checkpoint or the new one.
"""

import contextlib
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from memfit.accelerator import device_of_backend
from memfit.errors import InvalidFile, InvalidInput, RankError, first_line
from memfit.files import atomic_file, parse_json
from memfit.step.step import Step
from memfit.step.tensor_file import TensorFile, write_tensors
from memfit.step.tree import put_together, take_apart
from memfit.tensors import local_part

FORMAT = "memfit.sharded"
VERSION = 1
_INDEX = "checkpoint.json"
_PREFIX = "shards-"  # of folders that are ours to remove
_STATE = "optimizer.state."
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_sharded(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: Step | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of a run on any number of ranks into the folder `path`; called on all of them.

    With a `step` its schedule, scale, position and every rank's generators are saved too. `extra` holds numbers,
    strings and containers of them, those of the first rank. See Note [Replaced in one move].
    """
    folder = Path(path)
    tensors, values = _saved_state_of(model, optimizer)
    extra_values, extra_tensors = take_apart(dict(extra or {}))
    if extra_tensors:
        raise InvalidInput(f"extra holds a tensor, {next(iter(extra_tensors))!r}; give numbers and strings")
    if step is not None and any(parameter.grad is not None for parameter in model.parameters()):
        raise InvalidInput("gradients are being accumulated; save after an update, when there are none")
    number = _agreed(_last_number(folder) + 1)
    place = folder / f"{_PREFIX}{number:08}"
    with _together("write its part of the checkpoint"):
        place.mkdir(parents=True, exist_ok=True)
    _write_shards(tensors, place)  # which raises on all ranks if it does on one
    with _together("write its part of the checkpoint"):
        if step is not None:
            tree, own = take_apart(step.progress_dict())
            write_tensors(_rank_file(place, _rank()), own, {"progress": json.dumps(tree)})
    content = {
        "format": FORMAT,
        "version": VERSION,
        "folder": place.name,
        "ranks": _world_size(),
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "values": take_apart(values)[0],
        "extra": extra_values,
    }
    with _together("write the index of the checkpoint"):
        if _rank() == 0:
            _replace(folder, place, content)


def load_sharded(
    path: str | Path, model: nn.Module, optimizer: Optimizer | None = None, *, step: Step | None = None
) -> dict[str, Any]:
    """Go on from a checkpoint that `save_sharded` wrote, on any number of ranks; returns its `extra`.

    Model and optimizer are built, and sharded or not, as the run wants them now. A `step` gets the generators of its
    rank; ranks that did not exist when it was saved get those of the first.
    """
    tensors, values = _state_of(model, optimizer)
    with _together("read the checkpoint"):
        index = _read_index(Path(path))
        never_updated = _never_updated(tensors, index)
        _check(tensors, index, type(model).__name__, without=never_updated)
    place = Path(path) / index["folder"]
    stand_ins = {name: _with_dimension(tensor) for name, tensor in tensors.items() if name not in never_updated}
    with _quiet():
        load(dict(stand_ins), storage_reader=HuggingFaceStorageReader(str(place)))
    for name, stand_in in stand_ins.items():
        if not tensors[name].dim():
            tensors[name].copy_(stand_in[0])
    saved = _plain(index["values"])
    values = {name: saved.get(name, value) for name, value in values.items()}
    _put_back(model, optimizer, tensors | values)
    _forget(model, optimizer, never_updated)
    if step is not None:
        step.load_progress_dict(_progress(place))
    return _plain(index["extra"])


def _state_of(model: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors by name, sharded as they are, and everything else."""
    model_state, optimizer_state = get_state_dict(model, [] if optimizer is None else optimizer, options=_FLAT)
    state: dict[str, Any] = {f"model.{name}": value for name, value in model_state.items()}
    state |= {f"optimizer.{name}": value for name, value in optimizer_state.items()}
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def _saved_state_of(model: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """As `_state_of`, with the optimizer left as it is: asked for its state, torch lets one that has none step."""
    is_fresh = optimizer is not None and not optimizer.state
    tensors, values = _state_of(model, optimizer)
    if not is_fresh:
        return tensors, values
    assert optimizer is not None
    optimizer.state.clear()
    return _without_state(tensors), _without_state(values)


def _without_state(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.startswith(_STATE)}


def _never_updated(tensors: Mapping[str, torch.Tensor], index: dict[str, Any]) -> set[str]:
    """States of parameters that had none when the checkpoint was saved, because no gradient had come to them."""
    known = {_parameter_of(name) for name in index["shapes"] if name.startswith(_STATE)}
    return {name for name in tensors if name.startswith(_STATE) and _parameter_of(name) not in known}


def _parameter_of(state: str) -> str:
    return state.removeprefix(_STATE).rpartition(".")[0]


def _forget(model: nn.Module, optimizer: Optimizer | None, states: set[str]) -> None:
    """Leave parameters without optimizer state that had none."""
    names = {_parameter_of(name) for name in states}
    for name, parameter in model.named_parameters():
        if optimizer is not None and name.removeprefix("module.") in names:
            optimizer.state.pop(parameter, None)


def _replace(folder: Path, place: Path, content: dict[str, Any]) -> None:
    """See Note [Replaced in one move]."""
    with atomic_file(folder / _INDEX, durable=True) as file:
        file.write(json.dumps(content).encode())
    for other in folder.iterdir():
        if other != place and _number_of(other):
            shutil.rmtree(other)


@contextlib.contextmanager
def _together(act: str) -> Iterator[None]:
    """Do something on every rank; if one of them fails, all raise."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = _agreed(int(failure is not None))
    if failure is not None:
        raise failure
    if failed:
        raise RankError(f"another rank could not {act}; see its own error. No rank goes on")


def _put_back(model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any]) -> None:
    parts: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for name, value in state.items():
        part, _, own = name.partition(".")
        parts[part][own] = value
    set_state_dict(
        model,
        [] if optimizer is None else optimizer,
        model_state_dict=parts["model"],
        optim_state_dict=parts["optimizer"],
        options=_FLAT,
    )


def _write_shards(tensors: Mapping[str, torch.Tensor], place: Path) -> None:
    content = {name: _with_dimension(tensor) for name, tensor in tensors.items()}
    with _quiet():
        save(
            dict(content),
            storage_writer=HuggingFaceStorageWriter(str(place), save_distributed=True),
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),  # buffers differ from rank to rank
        )


def _with_dimension(tensor: torch.Tensor) -> torch.Tensor:
    """Counters get a dimension, because slices of a file need one."""
    return tensor if tensor.dim() else local_part(tensor).detach().reshape(1).clone()


def _progress(place: Path) -> dict[str, Any]:
    file = _rank_file(place, _rank())
    if not file.exists():
        file = _rank_file(place, 0)
    if not file.exists():
        raise InvalidFile(f"{place.parent} was saved without a step; load it without one")
    stored = TensorFile(file)
    state: dict[str, Any] = put_together(json.loads(stored.metadata["progress"]), stored.tensor)
    return state


def _rank_file(place: Path, rank: int) -> Path:
    folder = place / "ranks"  # of its own: all that lies beside the shards is taken for one
    folder.mkdir(exist_ok=True)
    return folder / f"{rank:05}.safetensors"


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = parse_json((folder / _INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidFile(
            f"{folder} is not a checkpoint ({first_line(error)}); give a folder that save_sharded wrote"
        ) from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InvalidFile(f"{folder} is not a checkpoint of a sharded run; give a folder that save_sharded wrote")
    if index.get("version") != VERSION:
        raise InvalidFile(
            f"{folder} is a checkpoint of version {index.get('version')}, this memfit reads {VERSION}; use the version "
            "that wrote it"
        )
    return index


def _check(tensors: Mapping[str, torch.Tensor], index: dict[str, Any], model: str, *, without: set[str]) -> None:
    """Refuse the state of another model before anything is changed."""
    shapes = index["shapes"]
    for name, tensor in tensors.items():
        if name in without:
            continue
        if name not in shapes:
            raise InvalidFile(f"the checkpoint has no {name!r}, which this {model} has; build all as it was")
        if list(tensor.shape) != shapes[name]:
            raise InvalidFile(
                f"{name!r} has shape {tuple(shapes[name])} in the checkpoint, {tuple(tensor.shape)} here; build the "
                "model as it was"
            )
    unknown = [name for name in shapes if name.startswith("model.") and name not in tensors]
    if unknown:
        raise InvalidFile(f"the checkpoint has {unknown[0]!r}, which this {model} does not have; build it as it was")


def _plain(tree: Any) -> dict[str, Any]:
    def refuse(name: str) -> torch.Tensor:
        raise InvalidFile(f"the checkpoint is damaged: {name!r} stands where no tensor can be")

    return dict(put_together(tree, refuse))


def _last_number(folder: Path) -> int:
    return max((_number_of(each) for each in folder.iterdir()), default=0) if folder.is_dir() else 0


def _number_of(place: Path) -> int:
    """The number of a folder of shards; 0 for what is not one."""
    name = place.name.removeprefix(_PREFIX)
    return int(name) if place.name != name and name.isdigit() and place.is_dir() else 0


def _agreed(number: int) -> int:
    """The largest of all ranks' numbers."""
    if not dist.is_initialized():
        return number
    value = torch.tensor([number], device=device_of_backend())
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value.item())


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says about a run of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
        yield
