import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors_to_pack import LAYOUTS, assert_same_bits, with_special_values
from torch import nn

from memfit.ops.batch_norm import normalize

aten = torch.ops.aten


def assert_made_again(values: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    own = values.dtype if weight is None else weight.dtype
    statistics = [torch.zeros(values.shape[1], dtype=own), torch.ones(values.shape[1], dtype=own)]
    result, mean, inverse_deviation, *_ = aten._native_batch_norm_legit_functional(
        values, weight, bias, *statistics, True, 0.1, 1e-5
    )
    assert_same_bits(normalize(values, weight, bias, mean, inverse_deviation), result)


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 19), min_size=2, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    channels_last=st.booleans(),
    shift=st.sampled_from([0.0, 3.0, 1000.0]),
    affine=st.booleans(),
)
def test_any_shape_is_made_again(
    sizes: list[int], dtype: torch.dtype, channels_last: bool, shift: float, affine: bool
) -> None:
    values = (torch.randn(sizes) + shift).to(dtype)
    if channels_last and len(sizes) == 4:
        values = values.to(memory_format=torch.channels_last)
    own = torch.float64 if dtype is torch.float64 else torch.float32
    weight, bias = torch.randn(sizes[1], dtype=own), torch.randn(sizes[1], dtype=own)
    assert_made_again(values, weight if affine else None, bias if affine else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_parameters_of_half_precision(layout: str, dtype: torch.dtype) -> None:
    values = LAYOUTS[layout](torch.randn(5, 24, 9, 7).to(dtype))
    assert_made_again(values, torch.randn(24).to(dtype), torch.randn(24).to(dtype))


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_special_values(layout: str) -> None:
    values = with_special_values(LAYOUTS[layout](torch.randn(4, 33, 8, 8)))
    assert_made_again(values, torch.randn(33), torch.randn(33))
    assert_made_again(LAYOUTS[layout](torch.full((4, 33, 8, 8), -0.0)), torch.randn(33), torch.zeros(33))


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_as_big_as_in_a_model(layout: str) -> None:
    values = LAYOUTS[layout](torch.randn(4, 64, 28, 28))
    assert_made_again(values, torch.randn(64), torch.randn(64))


def test_the_running_statistics_are_left_alone() -> None:
    values = torch.randn(4, 8, 5, 5)
    mean, inverse_deviation = values.mean((0, 2, 3)), torch.rand(8)
    before = mean.clone()
    normalize(values, None, None, mean, inverse_deviation)
    assert torch.equal(mean, before)
    norm = nn.BatchNorm2d(8)
    norm(values)
    assert norm.num_batches_tracked == 1
