"""Note what code asks about settings of torch and of the process, which others may change between two calls."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from memfit.capture.outputs import is_constant

_ASKED: dict[Any, Callable[[], Any]] = {
    torch.get_float32_matmul_precision: torch.get_float32_matmul_precision,
    torch.get_num_threads: torch.get_num_threads,
    torch.get_num_interop_threads: torch.get_num_interop_threads,
    torch.initial_seed: torch.initial_seed,
    torch.is_anomaly_enabled: torch.is_anomaly_enabled,
    torch.get_autocast_dtype: lambda: str([torch.get_autocast_dtype(each) for each in ("cpu", "cuda")]),
}


class _Answer:
    """What a function answers, by its path."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __getitem__(self, _path: str) -> Any:
        return self._function()

    def get(self, path: str, _absent: Any = None) -> Any:
        return self[path]


class _Properties:
    """What a module of torch makes when it is asked (`torch.backends.cudnn.benchmark`)."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get(self, name: str, absent: Any = None) -> Any:
        return getattr(self._module, name, absent)


def answers(named: Iterator[tuple[str, Any, Any]]) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield a path, a home, a name in it and what is there now, of `named` paths with their owner and value."""
    for path, owner, value in named:
        name = path.rpartition(".")[2]
        try:
            function = _ASKED.get(value)
        except TypeError:  # what has no hash is no function
            function = None
        if function is not None:
            yield path, _Answer(function), path, function()
        elif isinstance(owner, ModuleType) and name not in vars(owner) and is_constant(value):
            yield path, _Properties(owner), name, value
