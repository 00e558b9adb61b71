"""Loaders and datasets give training the batches that they would have given, after one was fetched to plan."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from memfit.errors import InvalidInput
from memfit.integrations.data_state import data_put_back


class Augmented(Dataset[torch.Tensor]):
    """Draws from generators of its own, and counts."""

    def __init__(self) -> None:
        self.random, self.numpy = random.Random(3), np.random.default_rng(3)
        self.torch = torch.Generator().manual_seed(3)
        self.given = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> torch.Tensor:
        self.given += 1
        drawn = self.random.random() + self.numpy.random() + torch.rand((), generator=self.torch).item()
        return torch.tensor([place + drawn + self.given])


class Stream(IterableDataset[float]):
    def __init__(self, numbers: Iterator[float]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[float]:
        return self.numbers


def test_a_loader_with_generators_of_its_own_begins_anew():
    def loader() -> DataLoader[torch.Tensor]:
        return DataLoader(Augmented(), 8, shuffle=True, generator=torch.Generator().manual_seed(2))

    expected = [each.tolist() for each in loader()]
    tried = loader()
    with data_put_back(tried):
        next(iter(tried))
    assert [each.tolist() for each in tried] == expected


def test_a_list_that_is_iterated_goes_on_where_it_stood():
    stream = Stream(iter([1.0, 2.0, 3.0, 4.0]))
    with data_put_back(stream):
        next(iter(stream))
    assert next(iter(stream)) == 1.0


def test_a_stream_that_cannot_be_put_back_is_refused():
    stream = Stream(float(number) for number in range(4))
    with pytest.raises(InvalidInput, match="taken from a stream"), data_put_back(stream):
        next(iter(stream))


def test_a_dataset_of_many_samples_is_not_looked_through():
    samples = [[index] for index in range(10_000)]
    with data_put_back(DataLoader(samples, 4)):
        samples[0].append(1)
    assert samples[0] == [0, 1]
