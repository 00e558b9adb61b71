"""Where metrics go beside Python's logging: TensorBoard, wandb, or nowhere."""

import importlib
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from memfit.errors import InvalidInput

log = logging.getLogger("memfit.multilevel")


class Sink(Protocol):
    """Takes numbers by name."""

    def write(self, tag: str, metrics: Mapping[str, float], step: int) -> None: ...


class Nowhere:
    """Drops them."""

    def write(self, tag: str, metrics: Mapping[str, float], step: int) -> None:
        pass


class TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, folder: str | None) -> None:
        self._writer = _imported("torch.utils.tensorboard", "tensorboard").SummaryWriter(log_dir=folder)

    def write(self, tag: str, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{tag}/{name}", value, global_step=step)
        self._writer.flush()


class Wandb:
    """Scalars for wandb, in the run that is active."""

    def __init__(self) -> None:
        self._wandb = _imported("wandb", "wandb")
        if self._wandb.run is None:
            self._wandb.init()

    def write(self, tag: str, metrics: Mapping[str, float], step: int) -> None:
        self._wandb.log({f"{tag}/{name}": value for name, value in metrics.items()}, step=step)


def make_sink(kind: str, folder: str | None) -> Sink:
    """The sink that an engine's configuration names."""
    if kind == "tensorboard":
        return TensorBoard(folder)
    return Wandb() if kind == "wandb" else Nowhere()


def write_metrics(
    sink: Sink, tag: str, metrics: Mapping[str, Any], *, step: int, local_step: int | None = None
) -> None:
    """Log a line for people and numbers for the sink; only here values are waited for."""
    numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
    shown = " ".join(f"{name} {value:.6g}" for name, value in numbers.items())
    log.info("%s, step %s%s: %s", tag, step, "" if local_step is None else f" (own {local_step})", shown)
    sink.write(tag, numbers, step)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float)


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InvalidInput(
            f'logger_type="{package}" needs the package {package}, which is not installed; install it, or leave '
            "logger_type out"
        ) from None
