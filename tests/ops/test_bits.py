import pytest
import torch
from tensors_to_pack import LAYOUTS, LENGTHS, assert_same_bits

from memfit.ops.bits import pack, unpack


@pytest.mark.parametrize("length", LENGTHS)
def test_a_mask_comes_back_from_its_bits(length: int) -> None:
    mask = torch.rand(length) > 0.4
    bits = pack(mask)
    assert bits.numel() == -(-length // 8)
    assert_same_bits(unpack(bits, mask.shape, mask.stride()), mask)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_comes_back_in_its_layout(layout: str) -> None:
    mask = LAYOUTS[layout](torch.rand(3, 5, 7, 11) > 0.5)
    assert_same_bits(unpack(pack(mask), mask.shape, mask.stride()), mask)


def test_a_scalar_comes_back() -> None:
    for value in (True, False):
        mask = torch.tensor(value)
        assert_same_bits(unpack(pack(mask), (), ()), mask)


def test_bit_i_of_a_byte_is_value_i() -> None:
    assert pack(torch.tensor([1, 0, 0, 0, 1, 1, 0, 1, 0, 1], dtype=torch.bool)).tolist() == [0b10110001, 0b10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_numbers_are_packed_by_whether_they_differ_from_zero(dtype: torch.dtype) -> None:
    values = torch.randint(-2, 3, (1003,)).to(dtype)
    assert_same_bits(pack(values), pack(values != 0))


def test_not_a_number_differs_from_zero_and_minus_zero_does_not() -> None:
    values = torch.tensor([torch.nan, -torch.nan, 0.0, -0.0, torch.inf, 1e-45, -1e-45, 0.0])
    assert pack(values).item() == 0b01110011


def test_packing_leaves_its_input_alone() -> None:
    mask = torch.rand(1000) > 0.5
    before = mask.clone()
    pack(mask)
    assert torch.equal(mask, before)
