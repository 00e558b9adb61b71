from collections.abc import Callable

import pytest
import torch
from tensors_to_pack import HALF, LAYOUTS

from memfit.ops import lossy
from memfit.ops.lossy import (
    GROUP,
    from_bfloat16,
    pack_4_bits,
    pack_8_bits,
    to_bfloat16,
    unpack_4_bits,
    unpack_8_bits,
)

WAYS: dict[int, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    8: (pack_8_bits, unpack_8_bits),
    4: (pack_4_bits, unpack_4_bits),
}
LENGTHS = [0, 1, GROUP - 1, GROUP, GROUP + 1, 1003, lossy._PIECE, lossy._PIECE + 5]


def rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    pack, unpack = WAYS[bits]
    result = unpack(pack(values), values.shape, values.stride(), values.dtype)
    assert (result.dtype, result.shape, result.stride()) == (values.dtype, values.shape, values.stride())
    return result


@pytest.mark.parametrize("bits", WAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_error_is_at_most_half_a_step(length: int, bits: int) -> None:
    values = torch.randn(length) * 3 + 1
    result = rounded(values, bits)
    for group, other in zip(values.split(GROUP), result.split(GROUP), strict=True):
        step = (group.max() - group.min()) / (2**bits - 1) if len(group) else 0
        assert ((group - other).abs() <= step * 0.501 + 1e-6).all()


@pytest.mark.parametrize("bits", WAYS)
def test_a_form_takes_its_bits_and_eight_bytes_a_group(bits: int) -> None:
    form = WAYS[bits][0](torch.randn(10 * GROUP))
    assert form.dtype is torch.uint8
    assert form.numel() == 10 * (GROUP * bits // 8 + 8)


@pytest.mark.parametrize("bits", WAYS)
@pytest.mark.parametrize("value", [0.0, 0.3, -1e30, 1e-38])
def test_a_group_of_one_value_comes_back(value: float, bits: int) -> None:
    values = torch.full((3 * GROUP + 1,), value)
    assert torch.equal(rounded(values, bits), values)


def test_values_on_the_grid_come_back() -> None:
    values = torch.arange(16.0).repeat(GROUP)
    assert torch.equal(rounded(values, 4), values)


@pytest.mark.parametrize("dtype", [*HALF, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", WAYS)
def test_layouts_and_dtypes_come_back(bits: int, layout: str, dtype: torch.dtype) -> None:
    values = LAYOUTS[layout](torch.randn(3, 5, 7, 11).to(dtype))
    assert (rounded(values, bits) - values).abs().max() < 7 / (2**bits - 1) / 2 + 0.05


@pytest.mark.parametrize("bits", WAYS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_group_and_no_other(value: float, bits: int) -> None:
    values = torch.randn(3 * GROUP)
    values[GROUP + 5] = value
    finite = rounded(values, bits).view(3, GROUP).isfinite()
    assert finite[0].all()
    assert finite[2].all()
    assert not finite[1, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sixteen_bits_are_bfloat16(dtype: torch.dtype) -> None:
    values = torch.randn(37, 11, dtype=dtype).t()
    form = to_bfloat16(values)
    assert form.element_size() == 2
    result = from_bfloat16(form, dtype)
    assert (result.dtype, result.stride()) == (dtype, values.stride())
    assert ((result - values).abs() <= values.abs() * 2**-8).all()


def test_rounding_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    values = torch.randn(0)
    rounded(torch.ones(1000), 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(values, rounded(values, 8))
