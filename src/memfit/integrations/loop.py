"""Fit a model inside a loop that its user wrote, with the loss wherever it is computed."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memfit.capture.autocast import autocast, autocast_state
from memfit.capture.sample import Sample
from memfit.integrations.outermost import OutermostCalls
from memfit.integrations.within import (
    Fitted,
    Part,
    RehearsedStep,
    Wishes,
    check_trainable,
    fit_model,
    fit_parts,
    generators_put_back,
    gradient_bytes,
    memory_of,
)

Precision = Callable[[], contextlib.AbstractContextManager[Any]]  # what the framework puts around a forward pass


def fit_in_loop(
    model: nn.Module,
    batch: Any,
    wishes: Wishes,
    *,
    optimizer: torch.optim.Optimizer | None,
    loss: Callable[[Any, Any], torch.Tensor] | None,
    precision: Precision = contextlib.nullcontext,
    running: Precision | None = None,
    gradient_sets: int = 0,
) -> Fitted:
    """Fit `model` on `batch`: as its own sample if it returns its loss, else as what `loss(model, batch)` takes.

    `precision` is what the model's forward runs in, `running` what the loss and it run in, if that is something
    else; `gradient_sets` how often the gradients live beside those of the batch at hand.
    """
    check_trainable(model)
    beside_bytes = gradient_sets * gradient_bytes(model)
    with generators_put_back():
        if loss is None:
            with precision():
                part = Part(model=model, sample=Sample.of(batch))
                return fit_model(part, wishes, optimizer=optimizer, beside_bytes=beside_bytes)

        held: list[torch.Tensor] = []  # some losses hold more than the number they are, such as `mse_loss`

        def run() -> None:
            with autocast(autocast_state(), enabled=False), (running or precision)():
                value = loss(model, batch)
            held[:] = [value]
            with autocast(autocast_state(), enabled=False):
                value.backward()

        optimizers: Sequence[torch.optim.Optimizer] = [] if optimizer is None else [optimizer]
        memory = memory_of(optimizers)
        step = RehearsedStep(model, run, batch, optimizer=memory, beside_bytes=beside_bytes, held=held)
        parts = _parts(model, step)
        with precision():
            return fit_parts(parts, step, wishes)


def _parts(model: nn.Module, step: RehearsedStep) -> list[Part]:
    calls = OutermostCalls(model)
    with calls.following():
        step.rehearse()
    return calls.parts()
