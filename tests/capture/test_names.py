"""What code names: closures, modules in modules, clocks and iterators."""

import gc
import itertools
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture import names
from memfit.capture.names import Names, check_same_in_every_call
from memfit.capture.notes import Notes

NUMBERS = itertools.count()


def scaled(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(batch: torch.Tensor) -> torch.Tensor:
        return batch * scale

    return run


def functions_of(count: int) -> list[types.FunctionType]:
    return [scaled(float(number)) for number in range(count)]  # type: ignore[misc]


def noted(functions: list[types.FunctionType]) -> Notes:
    notes = Notes(lambda path, thing: False, lambda module: False)
    Names(notes).note([(each.__code__, each.__globals__) for each in functions])
    return notes


def test_all_closures_of_some_code_are_noted() -> None:
    functions = functions_of(3)
    values = [each.value for each in noted(functions[:1]).places.values()]
    assert {0.0, 1.0, 2.0} <= {*values}


def test_all_objects_there_are_are_walked_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []

    def counted(*codes: Any) -> list[Any]:
        walks.append(len(codes))
        return gc.get_referrers(*codes)

    monkeypatch.setattr(names, "gc", types.SimpleNamespace(get_referrers=counted))
    other: Any = lambda: (functions, walks)  # noqa: E731
    functions = functions_of(2)
    noted([*functions, other])
    assert walks == [2]


def uses_nested() -> Any:
    return nn.functional.gelu(torch.ones(1))


def test_a_function_in_a_module_in_a_module_is_noted() -> None:
    paths = {place.path for place in noted([uses_nested]).places.values()}  # type: ignore[list-item]
    assert "nn.functional.gelu" in paths


def asks_the_time() -> float:
    return time.perf_counter()


def counts() -> int:
    return next(NUMBERS)


def computes() -> torch.Tensor:
    time.sleep(0.0)
    return torch.ones(3)


@pytest.mark.parametrize(
    ("function", "reason"), [(asks_the_time, "calls time.perf_counter"), (counts, "reads NUMBERS, an iterator")]
)
def test_what_answers_otherwise_in_every_call_is_refused(function: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_same_in_every_call(function.__code__, function.__globals__)


def test_what_computes_is_not_refused() -> None:
    check_same_in_every_call(computes.__code__, computes.__globals__)
