"""A transformers Trainer inside a budget: one line before `trainer.train()`.

    trainer = memfit.integrations.transformers.fit(trainer, budget="6GiB")

Note [What the trainer does]
    The model is planned on the trainer's own longest batch, as its `compute_loss` calls it, under its precision, with
    its optimizer, with room for the gradients of earlier batches if it accumulates, and for those that
    DistributedDataParallel sends if it runs in several processes. If the loss is computed outside the model (label
    smoothing, `compute_loss_func`, an own `compute_loss`), `compute_loss` is rehearsed and measured, see
    Note [Measured and tightened] in `within.py`.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import Trainer

from memfit.capture.autocast import autocast, autocast_state
from memfit.capture.sample import Sample
from memfit.errors import CaptureError, InvalidInput
from memfit.execute.attach import check_unplanned
from memfit.integrations.prepared import as_prepared
from memfit.integrations.trainer_data import BucketCollator, TrainerData, look_at_data, pad_side, pad_values, search_s
from memfit.integrations.trainer_options import check_options
from memfit.integrations.trainer_report import ReportCallback
from memfit.integrations.within import (
    Fitted,
    Part,
    RehearsedStep,
    Wishes,
    fit_model,
    fit_parts,
    generators_put_back,
    gradient_bytes,
    memory_of,
)
from memfit.recipe import EXACT, Budget
from memfit.step.buckets import Buckets
from memfit.tensors import storage_bytes

log = logging.getLogger(__name__)

__all__ = ["ReportCallback", "fit"]


def fit(
    trainer: Trainer,
    budget: Budget,
    *,
    allow: Sequence[str] = EXACT,
    buckets: Buckets | int | None = 8,
    time_limit: float | None = None,
    measure_every: int = 100,
) -> Trainer:
    """Train inside a budget: the same trainer, its model planned; see Note [What the trainer does].

    `budget`, `allow` and `time_limit` are those of `memfit.plan`; the optimizer's state is part of the budget. Without
    a limit a search may take a second for every hundred steps of the training, from 1 to 6. Data of different lengths
    is padded to `buckets`: at most so many, or the ones given; None captures every length by itself. The measured peak
    of the second step and of every `measure_every`-th goes to the trainer's logs.
    """
    if not isinstance(trainer, Trainer):
        raise InvalidInput(f"a transformers.Trainer was expected, a {type(trainer).__name__} was given")
    check_options(trainer)
    check_unplanned(trainer.model)
    limit_s = search_s(trainer) if time_limit is None else time_limit
    wishes = Wishes(budget=budget, allow=tuple(allow), time_limit_s=limit_s)
    data = look_at_data(trainer, buckets)
    with _training_mode(trainer.model), generators_put_back():
        fitted = _fitted(trainer, data, wishes)
    if data.buckets is not None:
        _pad_batches(trainer, data.buckets)
    beside_bytes = _batches_alive(trainer) * storage_bytes(dict(data.batch))
    trainer.add_callback(ReportCallback(trainer, fitted, data.buckets, measure_every, beside_bytes=beside_bytes))
    callbacks = trainer.callback_handler.callbacks
    callbacks.insert(0, callbacks.pop())  # before loggers, which close when training ends
    log.info("%s: %s", type(trainer.model).__name__, fitted)
    return trainer


def _fitted(trainer: Any, data: TrainerData, wishes: Wishes) -> Fitted:
    inputs = trainer._prepare_inputs(dict(data.batch))
    items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
    part = Part(model=trainer.model, sample=_call_of(trainer, inputs, items))
    beside_bytes = _beside_bytes(trainer, storage_bytes(dict(data.batch)))
    with _optimizer_of(trainer) as optimizer, trainer.accelerator.autocast(), _explained():
        if not _computes_loss_outside(trainer, part.sample):
            return _fit_with_loss(part, wishes, optimizer, beside_bytes)

        def run() -> None:
            with autocast(autocast_state(), enabled=False), as_prepared(trainer.accelerator, trainer.model):
                trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=items).backward()

        memory = memory_of([optimizer])
        step = RehearsedStep(trainer.model, run, inputs, optimizer=memory, beside_bytes=beside_bytes)
        return fit_parts([part], step, wishes)


def _fit_with_loss(part: Part, wishes: Wishes, optimizer: Any, beside_bytes: int) -> Fitted:
    """The trainer reads nothing but the loss, so no other output need be kept; regions know all outputs only."""
    only_loss = Wishes(budget=wishes.budget, allow=wishes.allow, outputs="loss", time_limit_s=wishes.time_limit_s)
    try:
        return fit_model(part, only_loss, optimizer=optimizer, beside_bytes=beside_bytes)
    except CaptureError:
        return fit_model(part, wishes, optimizer=optimizer, beside_bytes=beside_bytes)


class _Reached(BaseException):
    """The model is about to be called."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample


def _call_of(trainer: Any, inputs: Mapping[str, Any], items: Any) -> Sample:
    """What the trainer calls its model with; nothing is computed."""

    def reached(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(Sample(args, kwargs))

    hook = trainer.model.register_forward_pre_hook(reached, with_kwargs=True, prepend=True)
    try:
        trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=items)
    except _Reached as call:
        return call.sample
    finally:
        hook.remove()
    raise InvalidInput(f"{type(trainer).__name__}.compute_loss never calls the trainer's model; nothing can be planned")


def _computes_loss_outside(trainer: Any, call: Sample) -> bool:
    own = {"compute_loss", "training_step"}
    overridden = any(getattr(type(trainer), name) is not getattr(Trainer, name) for name in own)
    labelled = any(name in call.kwargs for name in (*trainer.label_names, "return_loss"))
    return overridden or trainer.label_smoother is not None or trainer.compute_loss_func is not None or not labelled


def _beside_bytes(trainer: Any, batch_bytes: int) -> int:
    """What lives beside the model in the trainer's steps."""
    sets = int(trainer.args.gradient_accumulation_steps > 1) + int(trainer.args.world_size > 1)
    return sets * gradient_bytes(trainer.model) + (_batches_alive(trainer) - 1) * batch_bytes


def _batches_alive(trainer: Any) -> int:
    """Batches are fetched for a whole update, and one ahead."""
    return int(trainer.args.gradient_accumulation_steps) + 1


@contextlib.contextmanager
def _optimizer_of(trainer: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizer that the trainer will make, or was given."""
    given = trainer.optimizer
    try:
        yield trainer.create_optimizer()
    finally:
        trainer.optimizer = given


@contextlib.contextmanager
def _training_mode(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.train()
    try:
        yield
    finally:
        model.train(was_training)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say where a Trainer keeps what an error is about."""
    try:
        yield
    except CaptureError as error:
        if "cache_enabled=False" not in str(error):
            raise
        raise CaptureError(
            f"{error}; for a Trainer: trainer.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)",
            module=error.module,
            source=error.source,
        ) from error


def _pad_batches(trainer: Any, buckets: Buckets) -> None:
    """Training batches are padded to the buckets; those of evaluation stay as they are."""
    make_loader = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        collator = trainer.data_collator
        trainer.data_collator = BucketCollator(collator, buckets, pad_values(trainer), pad_side(trainer))
        try:
            return make_loader()
        finally:
            trainer.data_collator = collator

    trainer.get_train_dataloader = get_train_dataloader
