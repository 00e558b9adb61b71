from typing import Any

import pytest
import torch
from tensors_to_pack import assert_same_bits

from memfit.ops.convolution_backward import convolution_backward, convolution_backward_

aten = torch.ops.aten


def arguments(*, groups: int = 1, stride: int = 1, bias: bool = True, dtype: torch.dtype = torch.float64) -> Any:
    values = torch.randn(3, 8, 12, 12, dtype=dtype)
    weight = torch.randn(8, 8 // groups, 3, 3, dtype=dtype)
    gradient = torch.randn(3, 8, 12 // stride, 12 // stride, dtype=dtype)
    settings = [[8], [stride, stride], [1, 1], [1, 1], False, [0, 0], groups]
    return gradient, values, weight, *settings, [True, True, bias]


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gradients_are_those_of_the_operator(groups: int, stride: int, bias: bool) -> None:
    args = arguments(groups=groups, stride=stride, bias=bias)
    expected = aten.convolution_backward(*args)
    for made, own in zip(convolution_backward(*args), expected, strict=True):
        assert (made is None) == (own is None)
        if own is not None:
            torch.testing.assert_close(made, own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_gradient_of_the_same_shape_is_overwritten(dtype: torch.dtype) -> None:
    args = arguments(dtype=dtype)
    expected = convolution_backward(*args)
    gradient = args[0].clone()
    made = convolution_backward_(gradient, *args[1:])
    assert made[0].data_ptr() == gradient.data_ptr()
    for one, other in zip(made, expected, strict=True):
        assert_same_bits(one, other)
