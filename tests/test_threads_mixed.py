"""Ten threads with models of several kinds, some of which fail: the others are right, and nothing is left behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_threads import Looking, Net, in_threads, made, same, shared_state, steps
from torch import nn

import memfit

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

OPTIONS: dict[str, Any] = {"time_limit": 0.1, "progress": False}


class Raising(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("a mistake of the model")


class Recurrent(Net):
    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.recurrent = nn.GRU(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.recurrent(x[None])[0][0])


KINDS: list[type[Net]] = [Net, Looking, Recurrent, Raising, Net]


def fitted(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    return steps(memfit.fit(model, batch, "smallest", **OPTIONS), batch)


def planned_then_applied(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    plan = memfit.plan(model, batch, budget="smallest", **OPTIONS)
    return steps(memfit.apply(plan, model, batch), batch)


def fitted_then_removed(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    memfit.estimate(model, batch, progress=False)
    return steps(memfit.remove(memfit.fit(model, batch, "smallest", remember=False, **OPTIONS)), batch)


WAYS: list[Callable[[nn.Module, torch.Tensor], Any]] = [fitted, planned_then_applied, fitted_then_removed]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(len(WAYS)))
def test_failures_of_some_threads_are_theirs_alone(first: int) -> None:
    kinds = [KINDS[number % len(KINDS)] for number in range(10)]
    subjects = [made(8 + number, kind) for number, kind in enumerate(kinds)]
    twins = [made(8 + number, kind) for number, kind in enumerate(kinds)]
    before = shared_state()
    works = [WAYS[(number + first) % len(WAYS)] for number in range(10)]
    found = in_threads(*[lambda way=way, each=each: way(*each) for way, each in zip(works, subjects, strict=True)])
    assert shared_state() == before
    for kind, returned, twin in zip(kinds, found, twins, strict=True):
        if kind is Raising:
            assert isinstance(returned, KeyError | memfit.CaptureError)
        else:
            assert not isinstance(returned, BaseException), returned
            assert same(returned, steps(*twin))
