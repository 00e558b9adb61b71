import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors_to_pack import assert_same_bits, with_special_values
from torch import nn

from memfit.capture.alternatives import extend
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.ops.batch_norm_backward import batch_norm_backward, batch_norm_backward_

aten = torch.ops.aten


def arguments(sizes: list[int], dtype: torch.dtype, *, with_statistics: bool = True) -> tuple[Any, ...]:
    """What the operator takes after a forward pass in training mode."""
    own = torch.float64 if dtype is torch.float64 else torch.float32
    values, gradient = (torch.randn(sizes).to(dtype) for _ in range(2))
    weight, bias = torch.randn(sizes[1], dtype=own), torch.randn(sizes[1], dtype=own)
    statistics = (
        (torch.zeros(sizes[1], dtype=own), torch.ones(sizes[1], dtype=own)) if with_statistics else (None, None)
    )
    saved = aten.native_batch_norm(values, weight, bias, None, None, True, 0.1, 1e-5)[1:]
    return gradient, values, weight, *statistics, *saved, True, 1e-5, [True, True, True]


def assert_same(args: tuple[Any, ...]) -> None:
    expected = aten.native_batch_norm_backward(*args)
    for made, own in zip(batch_norm_backward(*args), expected, strict=True):
        assert_same_bits(made, own)
    gradient = args[0].clone()
    for made, own in zip(batch_norm_backward_(gradient, *args[1:]), expected, strict=True):
        assert_same_bits(made, own)
    assert_same_bits(gradient, expected[0])  # it was overwritten


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 17), min_size=3, max_size=5).filter(lambda sizes: math.prod(sizes[2:]) > 1),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    with_statistics=st.booleans(),
)
def test_any_shape_gives_the_same_bits(sizes: list[int], dtype: torch.dtype, with_statistics: bool) -> None:
    assert_same(arguments(sizes, dtype, with_statistics=with_statistics))


@pytest.mark.parametrize(
    "sizes", [[4, 7, 150, 151], [2, 33, 64, 64], [300, 5, 40, 40], [9000, 50, 2], [1, 3, 700, 700]]
)
def test_several_slices_give_the_same_bits(sizes: list[int]) -> None:
    assert_same(arguments(sizes, torch.float32))


def test_special_values_give_the_same_bits() -> None:
    args = arguments([4, 6, 100, 100], torch.float32)
    for tensor in args[:2]:
        tensor.view(-1)[:12] = with_special_values(torch.randn(12))
    assert_same(args)


@pytest.mark.parametrize("sizes", [[64, 128], [64, 128, 1, 1]])
def test_without_places_it_is_not_offered(sizes: list[int]) -> None:
    layer = nn.BatchNorm1d(128) if len(sizes) == 2 else nn.BatchNorm2d(128)
    with traced(layer, Sample.of(torch.randn(sizes))) as joint:
        extend(joint, ("lean",))
        assert all(each.technique != "batch_norm_backward" for each in lower(joint).alternatives)
