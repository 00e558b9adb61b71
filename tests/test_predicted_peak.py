"""The predicted peak of a training step is the measured one."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import (
    Case,
    Checkpointed,
    Gated,
    LanguageModel,
    TimeFirst,
    bfloat16,
    biases_only,
    channels_last_images,
    convolutions,
    cross_entropy,
    encoder,
    half_frozen,
    images,
    mean_square,
    sequences,
    tied,
    words,
)
from torch import nn

import memfit
from memfit.measure.peak import measure_peak

CASES: dict[str, Case] = {
    "convolutions": Case(model=convolutions, batch=images, loss=cross_entropy),
    "channels last": Case(
        model=lambda: convolutions().to(memory_format=torch.channels_last),
        batch=channels_last_images,
        loss=cross_entropy,
    ),
    "half frozen": Case(model=half_frozen, batch=images, loss=cross_entropy),
    "tied weights": Case(
        model=tied, batch=lambda: (torch.randn(512, 256), torch.randint(256, (512,))), loss=cross_entropy
    ),
    "transformer encoder": Case(model=encoder, batch=sequences, loss=mean_square),
    "backward formulas with temporaries": Case(
        model=encoder, batch=sequences, loss=lambda model, batch: model(batch[0]).square().mean()
    ),
    "a linear layer on a transposed batch": Case(
        model=TimeFirst, batch=lambda: (torch.randn(8, 64, 16),), loss=lambda model, batch: model(batch[0]).mean()
    ),
    "checkpointed blocks": Case(
        model=Checkpointed, batch=lambda: (torch.randn(256, 64), torch.randn(256, 64)), loss=mean_square
    ),
    "weights are frozen, biases are not": Case(model=biases_only, batch=images, loss=cross_entropy),
    "rows taken by index": Case(
        model=lambda: nn.Linear(16, 512),
        batch=lambda: (torch.randn(256, 16), torch.randint(256, (100,))),
        loss=lambda model, batch: model(batch[0])[batch[1]].exp().mean(),
    ),
    "binary cross entropy": Case(
        model=lambda: nn.Linear(16, 512),
        batch=lambda: (torch.randn(256, 16), torch.rand(256, 512)),
        loss=lambda model, batch: F.binary_cross_entropy_with_logits(model(batch[0]), batch[1]),
    ),
    "a weight used three times under autocast": Case(
        model=tied,
        batch=lambda: (torch.randn(512, 256), torch.randint(256, (512,))),
        loss=cross_entropy,
        around=bfloat16,
    ),
    "gates of a GRU": Case(model=Gated, batch=lambda: (torch.randn(8, 8, 64), torch.randn(8, 8, 64)), loss=mean_square),
    "LSTM": Case(model=LanguageModel, batch=lambda: words(500, 8, 16), loss=cross_entropy),
    "autocast": Case(model=convolutions, batch=images, loss=cross_entropy, around=bfloat16),
    "autocast around all": Case(model=convolutions, batch=images, loss=cross_entropy, around=bfloat16, whole=True),
}


def predicted_and_measured(case: Case, make_optimizer: Callable[..., torch.optim.Optimizer]) -> tuple[int, int]:
    model, batch = case.model().train(), case.batch()
    optimizer = make_optimizer([weight for weight in model.parameters() if weight.requires_grad])
    with case.around():
        estimate = memfit.estimate(model, batch, optimizer=optimizer, loss=case.loss)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with case.around():
            loss = case.loss(model, batch)
            if case.whole:
                finish(loss)
        if not case.whole:
            finish(loss)

    def finish(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    return estimate.peak_bytes, measure_peak(step, resident=[model, optimizer, batch]).peak_bytes


def momentum(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.01, momentum=0.9)


OPTIMIZERS = pytest.mark.parametrize("make_optimizer", [momentum, torch.optim.AdamW], ids=["SGD", "AdamW"])


@OPTIMIZERS
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_predicted_peak_is_the_measured_one(case: Case, make_optimizer: Any) -> None:
    predicted, measured = predicted_and_measured(case, make_optimizer)
    assert predicted == pytest.approx(measured, rel=0.01)


@OPTIMIZERS
@pytest.mark.parametrize("around", [contextlib.nullcontext, bfloat16], ids=["fp32", "bf16"])
def test_the_predicted_peak_of_gpt2_is_the_measured_one(
    tiny_gpt2: type[nn.Module], make_optimizer: Any, around: Any
) -> None:
    def batch() -> dict[str, torch.Tensor]:
        tokens, _ = words(100, 4, 32)
        return {"input_ids": tokens, "labels": tokens.clone()}

    case = Case(model=tiny_gpt2, batch=batch, loss=lambda model, batch: model(**batch).loss, around=around)
    predicted, measured = predicted_and_measured(case, make_optimizer)
    assert predicted == pytest.approx(measured, rel=0.01)


# Where the prediction is off by more than 1%, and why.
DEVIATIONS = {
    "casts kept until autocast ends": (
        Case(model=encoder, batch=sequences, loss=mean_square, around=bfloat16, whole=True),
        "-1.4%: eager keeps the casts of all weights while autocast lasts, here they die after their last use",
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.xfail(strict=True, reason=reason))
        for name, (case, reason) in DEVIATIONS.items()
    ],
)
def test_the_predicted_peak_is_the_measured_one_also_here(case: Case) -> None:
    predicted, measured = predicted_and_measured(case, momentum)
    assert predicted == pytest.approx(measured, rel=0.01)


def test_without_an_optimizer_forward_and_backward_are_predicted() -> None:
    model, batch = convolutions(), images()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        cross_entropy(model, batch).backward()

    step()
    model.zero_grad(set_to_none=True)
    measured = measure_peak(step, resident=[model, batch]).peak_bytes
    assert memfit.estimate(model, batch, loss=cross_entropy).peak_bytes == pytest.approx(measured, rel=0.01)


def test_without_a_loss_gradients_start_at_the_outputs() -> None:
    model, x = convolutions(), images()[0]

    def step() -> None:
        model.zero_grad(set_to_none=True)
        out = model(x)
        out.backward(torch.ones_like(out))

    step()
    model.zero_grad(set_to_none=True)
    measured = measure_peak(step, resident=[model, x]).peak_bytes
    assert memfit.estimate(model, x).peak_bytes == pytest.approx(measured, rel=0.01)


class Difference(nn.Module):
    """A loss of two terms: `mse_loss` leaves its one number in a storage as big as the images."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 16, 3, 2, 1)
        self.up = nn.ConvTranspose2d(16, 3, 4, 2, 1)
        self.in_place = in_place

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        codes = self.down(images)
        loss = F.mse_loss(self.up(codes).sigmoid(), images)
        return loss.sub_(codes.mean()) if self.in_place else loss - codes.mean()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_small_result_is_not_written_over_a_big_storage(in_place: bool) -> None:
    model, batch = Difference(in_place=in_place), torch.rand(4, 3, 32, 32)
    memfit.fit(model, batch, "1GiB", remember=False)
    plan = memfit.plan_of(model)
    assert plan is not None
    model(batch).backward()
    model.zero_grad()
    measured = measure_peak(lambda: model(batch).backward(), resident=[model, batch]).peak_bytes
    assert measured == pytest.approx(plan.peak_bytes, abs=1024)
