"""Twenty models that are built without downloads, each with a sample that is called as its users call it."""

import dataclasses

import pytest
import torch

from benchmarks.further_models import further_cases
from benchmarks.measuring import Subject
from memfit.cli.torchvision_repair import prepare


def test_there_are_twenty_of_different_names() -> None:
    assert len({case.name for case in further_cases()}) == 20


@pytest.mark.slow
@pytest.mark.parametrize("case", further_cases(), ids=str)
def test_every_one_of_them_trains(case: object) -> None:
    prepare()
    subject = Subject.of(dataclasses.replace(case, batch_size=2))  # type: ignore[type-var]
    assert torch.isfinite(subject.step(subject.model))
