import pytest
import torch
from tensors_to_pack import HALF, LAYOUTS, LENGTHS, assert_same_bits, with_special_values

from memfit.ops.bits import pack
from memfit.ops.dropout import apply_noise, unpack_noise


def noise_like(values: torch.Tensor, keep: float) -> torch.Tensor:
    """As dropout makes it."""
    return torch.empty_like(values).bernoulli_(keep).div_(keep)


def remade(noise: torch.Tensor, keep: float) -> torch.Tensor:
    return unpack_noise(pack(noise), noise.shape, noise.stride(), noise.dtype, keep)


@pytest.mark.parametrize("dtype", [*HALF, torch.float64], ids=str)
@pytest.mark.parametrize("keep", [0.9, 0.7, 1 / 3, 0.5, 0.1, 1.0])
def test_noise_comes_back_from_its_bits(keep: float, dtype: torch.dtype) -> None:
    noise = noise_like(torch.empty(1003, dtype=dtype), keep)
    assert_same_bits(remade(noise, keep), noise)


@pytest.mark.parametrize("length", LENGTHS)
def test_noise_of_any_length_comes_back(length: int) -> None:
    noise = noise_like(torch.empty(length), 0.9)
    assert_same_bits(remade(noise, 0.9), noise)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_comes_back_in_its_layout(layout: str) -> None:
    noise = noise_like(LAYOUTS[layout](torch.empty(3, 5, 7, 11)), 0.8)
    assert_same_bits(remade(noise, 0.8), noise)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_noise_is_applied_to_is_what_a_product_gives(layout: str, dtype: torch.dtype) -> None:
    values = with_special_values(LAYOUTS[layout](torch.randn(3, 5, 7, 11).to(dtype)))
    noise = noise_like(values, 0.7)
    assert_same_bits(apply_noise(values, pack(noise), 0.7), values * noise)


@pytest.mark.parametrize("length", LENGTHS)
def test_noise_is_applied_to_any_length(length: int) -> None:
    values = torch.randn(length)
    noise = noise_like(values, 0.9)
    assert_same_bits(apply_noise(values, pack(noise), 0.9), values * noise)


def test_the_bits_of_dropout_are_those_of_the_eager_run() -> None:
    values = torch.randn(1003)
    torch.manual_seed(5)
    expected = torch.nn.functional.dropout(values, 0.3)
    torch.manual_seed(5)
    noise = noise_like(values, 0.7)
    assert_same_bits(apply_noise(values, pack(noise), 0.7), expected)
