import copy

import pytest
import torch
from tensors_to_pack import HALF, LAYOUTS, LENGTHS, assert_same_bits, with_special_values
from torch import nn

import memfit
from memfit.ir import Phase
from memfit.ops.bits import pack
from memfit.ops.relu import (
    let_through,
    let_through_,
    let_through_or_scale,
    let_through_or_scale_,
    pack_inside,
    pack_positive,
)

aten = torch.ops.aten


def values_and_gradient(layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and gradients with special values, that meet in all combinations."""
    values = LAYOUTS[layout](torch.randn(3, 8, 7, 11).to(dtype))
    gradient = LAYOUTS[layout](torch.randn(3, 8, 7, 11).to(dtype))
    flat_values, flat_gradient = (each.as_strided((each.numel(),), (1,)) for each in (values, gradient))
    special = with_special_values(torch.randn(12).to(dtype))
    flat_values[:144] = special.repeat(12)
    flat_gradient[:144] = special.repeat_interleave(12)
    return values, gradient


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_relu_from_bits(layout: str, dtype: torch.dtype) -> None:
    values, gradient = values_and_gradient(layout, dtype)
    output = values.relu()
    assert_same_bits(let_through(gradient, pack(output)), aten.threshold_backward(gradient, output, 0))


@pytest.mark.parametrize("length", LENGTHS)
def test_the_gradient_of_relu_of_any_length(length: int) -> None:
    output, gradient = torch.randn(length).relu(), torch.randn(length)
    assert_same_bits(let_through(gradient, pack(output)), aten.threshold_backward(gradient, output, 0))


@pytest.mark.parametrize(("low", "high"), [(0.0, 6.0), (-1.0, 1.0), (-0.1, 0.1), (-1, 1)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_hardtanh_from_bits(layout: str, dtype: torch.dtype, low: float, high: float) -> None:
    values, gradient = values_and_gradient(layout, dtype)
    flat = values.as_strided((values.numel(),), (1,))
    flat[200:204] = torch.tensor([low, high, -low, -high])
    bits = pack_inside(values, low, high)
    assert_same_bits(let_through(gradient, bits), aten.hardtanh_backward(gradient, values, low, high))


@pytest.mark.parametrize("slope", [0.01, 0.2, 0.0, 1.0])
@pytest.mark.parametrize("is_result", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_gradient_of_leaky_relu_from_bits(dtype: torch.dtype, is_result: bool, slope: float) -> None:
    values, gradient = values_and_gradient("contiguous", dtype)
    expected = aten.leaky_relu_backward(gradient, values, slope, is_result)
    assert_same_bits(let_through_or_scale(gradient, pack_positive(values), slope), expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_other_rectifiers_of_any_length(length: int) -> None:
    values, gradient = torch.randn(length), torch.randn(length)
    bits = pack_inside(values, -1.0, 1.0)
    assert_same_bits(let_through(gradient, bits), aten.hardtanh_backward(gradient, values, -1.0, 1.0))
    expected = aten.leaky_relu_backward(gradient, values, 0.1, False)
    assert_same_bits(let_through_or_scale(gradient, pack_positive(values), 0.1), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_can_be_overwritten(layout: str) -> None:
    values, gradient = values_and_gradient(layout, torch.float32)
    bits = pack_positive(values)
    for function, form, constants in (
        (let_through, let_through_, ()),
        (let_through_or_scale, let_through_or_scale_, (0.1,)),
    ):
        own = gradient.clone()
        made = form(own, bits, *constants)
        assert made.data_ptr() == own.data_ptr()
        assert_same_bits(made, function(gradient, bits, *constants))


class InstanceNormBlocks(nn.Module):
    """Blocks as in nnU-Net: InstanceNorm ends in a view, LeakyReLU overwrites it, the backward pass views it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, 16, 3, padding=1) for width in (3, 16))
        self.norms = nn.ModuleList(nn.InstanceNorm2d(16, affine=True) for _ in range(2))
        self.act = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = self.act(self.norms[0](self.convolutions[0](images)))
        second = self.act(self.norms[1](self.convolutions[1](first)))
        return (first + second).square().mean()


@pytest.mark.usefixtures("one_thread")
def test_bits_of_a_value_that_the_backward_pass_views_anew_are_packed_in_the_forward_pass() -> None:
    images = torch.randn(2, 3, 24, 24)
    plain = InstanceNormBlocks()
    fitted = memfit.fit(copy.deepcopy(plain), images, "smallest", time_limit=0.5, remember=False)
    plan = memfit.plan_of(fitted)
    assert plan is not None
    packed = [each for each in plan.step.graph.alternatives if each.technique == "relu"]
    assert {each.phase for each in packed if each.target.endswith("pack_positive")} == {Phase.FORWARD}
    for model in (plain, fitted):
        model(images).backward()
    for one, other in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
