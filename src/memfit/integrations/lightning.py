"""Lightning inside a budget: a callback for its Trainer, a function for Fabric.

    trainer = L.Trainer(callbacks=[MemfitCallback(budget="6GiB")])

Note [What Lightning runs]
    `training_step` is run as it is, with its logging and its optimizers; planned are the modules that it calls. Which
    they are, and what they are called with, is seen in a rehearsal on the first batch when training starts, in
    which nothing is logged and no optimizer steps; see Note [Measured and tightened] in `within.py`. Lightning drops
    gradients of the last step only right before the backward pass; the callback does it before the forward pass.
"""

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from memfit.capture.autocast import autocast, autocast_state
from memfit.errors import InvalidInput
from memfit.execute.attach import captures_of, remove
from memfit.integrations.data_state import data_put_back
from memfit.integrations.loop import fit_in_loop
from memfit.integrations.outermost import OutermostCalls
from memfit.integrations.peak_report import PeakReport, capture_numbers
from memfit.integrations.within import (
    Fitted,
    Part,
    RehearsedStep,
    Wishes,
    fit_parts,
    generators_put_back,
    gradient_bytes,
    memory_of,
)
from memfit.recipe import EXACT, Budget
from memfit.tensors import storage_bytes

log = logging.getLogger(__name__)

__all__ = ["MemfitCallback", "fit"]


class MemfitCallback(Callback):  # type: ignore[misc]  # lightning is not looked into
    """Plans what `training_step` calls when training starts, and logs predicted and measured peaks.

    `budget`, `allow` and `time_limit` are those of `memfit.plan`; the optimizers' states are part of the budget. The
    plan is for batches like `batch`, by default the first one. The measured peak of the second batch and of every
    `measure_every`-th goes to the trainer's loggers. When training ends, modules run by themselves again.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        batch: Any = None,
        allow: Sequence[str] = EXACT,
        time_limit: float = 2.5,
        measure_every: int = 100,
    ) -> None:
        self.fitted: Fitted | None = None
        self.captures: list[str] = []
        self._wishes = Wishes(budget=budget, allow=tuple(allow), time_limit_s=time_limit)
        self._batch = batch
        self._parts: list[Part] = []
        self._report = PeakReport("batch", measure_every)

    @property
    def peak_bytes(self) -> int:
        """The highest measured."""
        return self._report.peak_bytes

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            _check_options(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report.restart()
        with generators_put_back():
            batch = _first_batch(trainer) if self._batch is None else self._batch
            batch = pl_module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
            batch = trainer.strategy.batch_to_device(batch)
            rehearsal = RehearsedStep(
                pl_module,
                lambda: _training_step(trainer, pl_module, batch),
                batch,
                optimizer=memory_of(trainer.optimizers),
                beside_bytes=_beside_bytes(trainer, pl_module, storage_bytes(batch)),
            )
            with _muted(pl_module):
                calls = OutermostCalls(pl_module)
                with calls.following():
                    rehearsal.rehearse()
                self._parts = calls.parts()
                with trainer.precision_plugin.train_step_context():
                    self.fitted = fit_parts(self._parts, rehearsal, self._wishes)
        log.info("%s: %s", ", ".join(type(part.model).__name__ for part in self._parts), self.fitted)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if pl_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
        ahead_bytes = storage_bytes(batch)  # the next one
        self._report.step_begins([pl_module, *trainer.optimizers, batch], beside_bytes=ahead_bytes)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        numbers = None if self.fitted is None else self._report.step_ended(self.fitted)
        if numbers is not None:
            _log(trainer, numbers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        models = [part.model for part in self._parts]
        self.captures = [f"{type(model).__name__}: {captures_of(model)}" for model in models]
        _log(trainer, capture_numbers(models))
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    def _remove(self) -> None:
        self._report.restart()
        for part in self._parts:
            remove(part.model)
        self._parts = []


def fit(
    fabric: Any,
    model: nn.Module,
    batch: Any,
    budget: Budget,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    accumulate: bool = False,
    allow: Sequence[str] = EXACT,
    time_limit: float = 2.5,
) -> nn.Module:
    """Train inside a budget with Fabric, before or after `fabric.setup`; the same model is returned.

    `batch` is what the model takes, if it returns its loss. With `loss(model, batch)` it is what that takes, and the
    loss counts too: it is rehearsed and measured. With an `optimizer` its state is part of the budget. `accumulate`
    keeps room for the gradients of earlier batches.
    """
    _check_strategy(fabric.strategy, "lightning.fabric.strategies")
    batch = fabric.strategy.precision.convert_input(batch)
    inner = model.module if isinstance(model, _FabricModule) else model
    if isinstance(optimizer, _FabricOptimizer):
        optimizer = optimizer.optimizer
    fit_in_loop(
        inner,
        batch,
        Wishes(budget=budget, allow=tuple(allow), time_limit_s=time_limit),
        optimizer=optimizer,
        loss=loss,
        precision=fabric.autocast,
        gradient_sets=int(accumulate) + int(fabric.world_size > 1),
    )
    return model


def _check_options(trainer: Trainer, pl_module: LightningModule) -> None:
    _check_strategy(trainer.strategy, "lightning.pytorch.strategies")
    if getattr(pl_module, "_compiler_ctx", None) is not None:
        raise InvalidInput("torch.compile compiles the module around its plan; give the Trainer the module itself")
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise InvalidInput("training_step(dataloader_iter) fetches its batches itself; take a batch instead")


def _check_strategy(strategy: Any, package: str) -> None:
    known = {SingleDeviceStrategy.__name__, DDPStrategy.__name__}
    if not {kind.__name__ for kind in type(strategy).__mro__} & known:
        raise InvalidInput(
            f"the strategy {type(strategy).__name__} of {package} places parameters itself, which a plan cannot "
            "follow; use one device, or DDP"
        )


def _first_batch(trainer: Trainer) -> Any:
    """A batch as the trainer will make its first, from loaders of our own: its own have begun to iterate."""
    combined = trainer.fit_loop._combined_loader
    twin = copy.copy(combined)
    twin.flattened = [_begun_anew(loader) for loader in combined.flattened]
    with data_put_back(*combined.flattened):
        batch, _, _ = next(iter(twin))
    return batch


def _begun_anew(loader: Any) -> Any:
    """A loader like another, that shares no iterator with it: persistent workers go on where they stood."""
    if not isinstance(loader, DataLoader):
        return loader
    twin = copy.copy(loader)
    twin._iterator = None
    return twin


def _training_step(trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
    """Forward and backward as the trainer runs them, without what it does around them."""
    takes_index = len(inspect.signature(pl_module.training_step).parameters) > 1
    with trainer.precision_plugin.train_step_context():
        output = pl_module.training_step(batch, 0) if takes_index else pl_module.training_step(batch)
    if pl_module.automatic_optimization:
        loss = output["loss"] if isinstance(output, Mapping) else output
        with autocast(autocast_state(), enabled=False):  # fitting has it on, the trainer does not
            loss.backward()


def _beside_bytes(trainer: Trainer, pl_module: LightningModule, batch_bytes: int) -> int:
    sets = int(trainer.accumulate_grad_batches > 1) + int(trainer.world_size > 1)
    sets += int(not pl_module.automatic_optimization)  # who drops gradients by hand does it before the backward pass
    return sets * gradient_bytes(pl_module) + batch_bytes  # the next batch is fetched ahead


def _log(trainer: Trainer, numbers: dict[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=trainer.global_step)


class _Still:
    """An optimizer or a scheduler that does all but step."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def step(self, *args: Any, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        run = next((each for each in (*args, closure) if callable(each)), None)
        return None if run is None else run()


@contextlib.contextmanager
def _muted(pl_module: LightningModule) -> Iterator[None]:
    """Let `training_step` log nothing and update nothing."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def still(real: Any) -> Any:
        return [_Still(each) for each in real] if isinstance(real, list) else real and _Still(real)

    optimizers, schedulers = pl_module.optimizers, pl_module.lr_schedulers
    own: dict[str, Any] = {
        "log": nothing,
        "log_dict": nothing,
        "manual_backward": lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
        "optimizers": lambda *args, **kwargs: still(optimizers(*args, **kwargs)),
        "lr_schedulers": lambda *args, **kwargs: still(schedulers(*args, **kwargs)),
    }
    before = {name: pl_module.__dict__[name] for name in own if name in pl_module.__dict__}
    pl_module.__dict__.update(own)
    try:
        yield
    finally:
        for name in own:
            pl_module.__dict__.pop(name, None)
        pl_module.__dict__.update(before)
