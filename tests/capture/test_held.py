"""Kinds of Python values, and what really lies in them."""

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from memfit.capture.guards import elements_of
from memfit.capture.held import generator_state, is_collected, is_plain, values_in


class Lazy(OrderedDict[str, int]):
    """A table whose values are made when they are asked for."""

    def values(self) -> Any:
        raise AssertionError("asked for values that do not lie in it")

    keys = items = __iter__ = __len__ = values


class LazyList(list[int]):
    def __iter__(self) -> Any:
        raise AssertionError("asked for elements that do not lie in it")

    __len__ = __iter__


@pytest.mark.parametrize("container", [Lazy(), LazyList([1, 2])])
def test_a_container_that_makes_its_elements_is_not_asked_for_them(container: Any) -> None:
    assert is_plain(container)
    assert not isinstance(container, list) or is_collected(container)
    assert elements_of(container) == values_in(container) == (() if isinstance(container, dict) else (1, 2))


def test_elements_of_a_dictionary_are_its_keys_and_values() -> None:
    assert elements_of({"a": 1, "b": 2}) == ("a", "b", 1, 2)
    assert values_in({3}) == values_in(frozenset({3})) == values_in((3,)) == (3,)


@pytest.mark.parametrize(
    "make",
    [
        random.Random,
        np.random.default_rng,
        np.random.RandomState,
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
    ],
)
def test_every_draw_is_another_state(make):
    one, other = make(3), make(3)
    assert generator_state(one) == generator_state(other)
    one.random()
    assert generator_state(one) != generator_state(other)
    other.random()
    assert generator_state(one) == generator_state(other)
