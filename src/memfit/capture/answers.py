"""Note what code asks about settings of torch and of the process, which others may change between two calls."""

from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from memfit.capture.outputs import is_constant


def _in_group(ask: Callable[[], int]) -> int:
    """Return an answer of the process group; -1 if there is none."""
    return ask() if torch.distributed.is_initialized() else -1


_ASKED: dict[Any, Callable[[], Any]] = {
    torch.get_float32_matmul_precision: torch.get_float32_matmul_precision,
    torch.get_num_threads: torch.get_num_threads,
    torch.get_num_interop_threads: torch.get_num_interop_threads,
    torch.initial_seed: torch.initial_seed,
    torch.is_anomaly_enabled: torch.is_anomaly_enabled,
    torch.get_autocast_dtype: lambda: str([torch.get_autocast_dtype(each) for each in ("cpu", "cuda")]),
    torch.distributed.is_initialized: torch.distributed.is_initialized,
    torch.distributed.get_world_size: lambda: _in_group(torch.distributed.get_world_size),
    torch.distributed.get_rank: lambda: _in_group(torch.distributed.get_rank),
}


class _Answer:
    """Hold what a function answers, by its path."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __getitem__(self, _path: str) -> Any:
        return self._function()

    def get(self, path: str, _absent: Any = None) -> Any:
        return self[path]


class _Properties:
    """Hold what a module of torch makes when it is asked (`torch.backends.cudnn.benchmark`)."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get(self, name: str, absent: Any = None) -> Any:
        return getattr(self._module, name, absent)


_ANSWERS = {function.__name__: _Answer(answer) for function, answer in _ASKED.items()}


def answers(names: Iterable[str], named: Iterable[tuple[str, Any, Any]]) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield a path, a home, a name in it and what is there now.

    `names` are all that some code has, also of what it has imported itself; `named` are paths of globals with their
    owner and value, which may have other names.
    """
    for name in names:
        if name in _ANSWERS:
            yield f"{name}()", _ANSWERS[name], name, _ANSWERS[name][name]
    for path, owner, value in named:
        name = path.rpartition(".")[2]
        if callable(value) and getattr(value, "__name__", "") in _ANSWERS and _is_asked(value):
            home = _ANSWERS[value.__name__]
            yield f"{path}()", home, value.__name__, home[value.__name__]
        elif isinstance(owner, ModuleType) and name not in vars(owner) and is_constant(value):
            yield path, _Properties(owner), name, value


def _is_asked(function: Any) -> bool:
    return any(function is each for each in _ASKED)
