"""Batches and arguments: their shapes, lengths, layouts and kinds."""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memfit
from patterns.models import Conv, Net, Normed, Words, loss_of_words, words
from patterns.pattern import (
    LEFT,
    STEPS,
    Pattern,
    State,
    features,
    fit,
    fit_with_room,
    loss_of,
    plain_sgd,
    step_of,
    usual_step,
)


class ByArguments(Net):
    def forward(self, batch: torch.Tensor, scale: float = 1.0, *, mode: str = "tanh", mask: Any = None) -> torch.Tensor:
        hidden = getattr(torch, mode)(self.first(batch)) * scale
        return self.second(hidden if mask is None else hidden * mask)


def with_arguments(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    mask = batch.new_ones(32, 32).tril() if number % 3 else None
    return loss_of(state.model(batch, 1.0 + number % 2, mode="tanh" if number < 10 else "sin", mask=mask), batch)


def of_words(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of_words(state.model(batch), batch)


def start_loading(state: State) -> None:
    data = TensorDataset(torch.cat([features(number) for number in range(STEPS)]))
    state.batches = iter(DataLoader(data, batch_size=32, shuffle=True, num_workers=2))


def loaded_step(state: State, batch: torch.Tensor, number: int) -> float:
    return usual_step(state, next(state.batches)[0], number)


def images(number: int) -> torch.Tensor:
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(number))


def image_loss(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return state.model(batch).square().mean()


def channels_last(state: State, number: int) -> None:
    if number == 10:
        state.model.to(memory_format=torch.channels_last)


def short_last(number: int) -> torch.Tensor:
    return features(number)[: 32 if number < STEPS - 1 else 20]


def other_lengths(number: int) -> torch.Tensor:
    return words(number, 12 - number % 3)


def use_deterministic(state: State, number: int) -> None:
    torch.use_deterministic_algorithms(number >= 10)


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(32)


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(32, dtype=torch.complex64))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return (torch.fft.fft(hidden) * self.turn).abs()


class TakesRecords(Net):
    def forward(self, record: Any) -> torch.Tensor:
        return super().forward(record.features)


class Record:
    def __init__(self, features: torch.Tensor) -> None:
        self.features = features


def record_step(state: State, batch: torch.Tensor, number: int) -> float:
    state.optimizer.zero_grad()
    loss = loss_of(state.model(Record(batch)), batch)
    loss.backward()
    state.optimizer.step()
    return loss.item()


def fit_record(state: State, sample: torch.Tensor) -> None:
    fit(state.model, (Record(sample),))


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    features: torch.Tensor
    scale: float = 1.0


class ReturnsItsRecord(Net):
    def forward(self, record: FrozenRecord) -> tuple[torch.Tensor, FrozenRecord]:  # type: ignore[override]
        return super().forward(record.features * record.scale), record


def of_frozen_record(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    record = FrozenRecord(batch, 1.0 + number // 10)
    output, same = state.model(record)
    assert same is record
    return loss_of(output, same.features)


def fit_frozen_record(state: State, sample: torch.Tensor) -> None:
    memfit.fit(state.model, (FrozenRecord(sample),), "1MiB", time_limit=1, progress=False)


class ScaledRecord(Record):
    scale = 1.0

    def scaled(self) -> torch.Tensor:
        return self.features * self.scale


class TakesScaledRecords(Net):
    def forward(self, record: Any) -> torch.Tensor:
        return super().forward(record.scaled())


def of_scaled_record(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return loss_of(state.model(ScaledRecord(batch)), batch)


def fit_scaled_record(state: State, sample: torch.Tensor) -> None:
    memfit.fit(state.model, (ScaledRecord(sample),), "1MiB", time_limit=1, progress=False)


def empty_last(number: int) -> torch.Tensor:
    return torch.randn(0 if number == 19 else 32, 16, generator=torch.Generator().manual_seed(number))


def summed(state: State, batch: torch.Tensor, number: int) -> torch.Tensor:
    return state.model(batch).square().sum()


PATTERNS = [
    Pattern(name="a DataLoader with two workers", make=Net, start=start_loading, step=loaded_step, slow=True),
    Pattern(
        name="channels_last from the tenth step on",
        make=Conv,
        batch=images,
        step=step_of(image_loss),
        change=channels_last,
        fit=fit_with_room,
    ),
    Pattern(
        name="deterministic algorithms from the tenth step on",
        make=lambda: Words(),
        batch=words,
        step=step_of(of_words),
        change=use_deterministic,
        end=lambda state: torch.use_deterministic_algorithms(False),
    ),
    Pattern(
        name="keywords and constants that change from call to call",
        make=ByArguments,
        step=step_of(with_arguments),
        fit=fit_with_room,
        slow=True,
    ),
    Pattern(name="a smaller last batch", make=Normed, batch=short_last),
    Pattern(name="sentences of other lengths", make=Words, batch=other_lengths, step=step_of(of_words)),
    Pattern(name="tied weights", make=lambda: Words(tied=True), batch=words, step=step_of(of_words)),
    Pattern(name="an embedding with padding", make=lambda: Words(padding=0), batch=words, step=step_of(of_words)),
    Pattern(
        name="an embedding with sparse gradients",
        outcome=LEFT + "makes a sparse tensor",
        make=lambda: Words(sparse=True),
        batch=words,
        step=step_of(of_words),
        optimizer=plain_sgd,
    ),
    Pattern(
        name="a lazy layer",
        make=Lazy,
        outcome="lazy layers",
    ),
    Pattern(name="complex numbers and a Fourier transform", make=Complex),
    Pattern(
        name="a batch in an object of one's own",
        make=TakesRecords,
        fit=fit_record,
        step=record_step,
    ),
    Pattern(
        name="a batch in a frozen dataclass, which is returned, too",
        make=ReturnsItsRecord,
        fit=fit_frozen_record,
        step=step_of(of_frozen_record),
    ),
    Pattern(
        name="a class attribute of the object that holds the batch, changed",
        make=TakesScaledRecords,
        fit=fit_scaled_record,
        step=step_of(of_scaled_record),
        change=lambda state, number: setattr(ScaledRecord, "scale", 1.0 + number // 10),
    ),
    Pattern(name="an empty last batch", make=Net, batch=empty_last, step=step_of(summed)),
]
