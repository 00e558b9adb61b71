from typing import Any

import pytest
import torch

from memfit.ops.inplace import in_place_form

aten = torch.ops.aten

# Functional operators with what they take beside their first argument.
POINTWISE: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.relu.default, ()),
    (aten.sigmoid.default, ()),
    (aten.tanh.default, ()),
    (aten.silu.default, ()),
    (aten.gelu.default, ()),
    (aten.exp.default, ()),
    (aten.neg.default, ()),
    (aten.abs.default, ()),
    (aten.hardswish.default, ()),
    (aten.hardsigmoid.default, ()),
    (aten.hardtanh.default, (-0.5, 0.5)),
    (aten.leaky_relu.default, (0.1,)),
    (aten.elu.default, (0.7,)),
    (aten.clamp.default, (-0.5, 0.5)),
    (aten.clamp_min.default, (0.1,)),
    (aten.threshold.default, (0.2, -1.0)),
    (aten.pow.Tensor_Scalar, (3,)),
    (aten.add.Scalar, (1,)),
    (aten.mul.Scalar, (3,)),
    (aten.add.Tensor, ("other",)),
    (aten.sub.Tensor, ("other",)),
    (aten.mul.Tensor, ("other",)),
    (aten.div.Tensor, ("other",)),
    (aten.addcmul.default, ("other", "other")),
    (aten.lerp.Scalar, ("other", 0.3)),
    (aten.masked_fill.Scalar, ("mask", 7.0)),
    (aten.bernoulli.p, (0.3,)),
]


@pytest.mark.parametrize(
    ("target", "form"),
    [
        (aten.relu.default, aten.relu_.default),
        (aten.add.Tensor, aten.add_.Tensor),
        (aten.mul.Tensor, aten.mul_.Tensor),
        (aten.hardtanh.default, aten.hardtanh_.default),
        (aten.bernoulli.p, aten.bernoulli_.float),
    ],
    ids=str,
)
def test_the_in_place_form_is_this(target: Any, form: Any) -> None:
    assert in_place_form(target) is form


def test_a_power_has_an_in_place_form() -> None:
    assert in_place_form(aten.pow.Tensor_Scalar) is aten.pow_.Scalar


@pytest.mark.parametrize(
    "target",
    [
        aten.convolution.default,
        aten.mm.default,
        aten.native_batch_norm.default,
        aten.native_layer_norm.default,
        aten.max_pool2d_with_indices.default,
        aten.cat.default,
        aten.bernoulli.default,
        aten.relu_.default,
        torch.ops.prims.add.default,
    ],
    ids=str,
)
def test_there_is_no_in_place_form_of_this(target: Any) -> None:
    assert in_place_form(target) is None


NOT_OPERATORS = {"function": torch.relu, "builtin": max, "nothing": None, "name": "aten.relu.default"}


@pytest.mark.parametrize("name", NOT_OPERATORS)
def test_what_is_no_operator_has_no_in_place_form(name: str) -> None:
    assert in_place_form(NOT_OPERATORS[name]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("target", "rest"), POINTWISE, ids=[str(target) for target, _ in POINTWISE])
def test_the_in_place_form_gives_the_same_bits(target: Any, rest: tuple[Any, ...], dtype: torch.dtype) -> None:
    value = torch.randn(37, 11).to(dtype)
    named = {"other": torch.randn(37, 11).to(dtype), "mask": torch.rand(37, 11) > 0.5}
    args = tuple(named.get(each, each) if isinstance(each, str) else each for each in rest)
    form = in_place_form(target)
    assert form is not None
    torch.manual_seed(1)
    expected = target(value, *args)
    torch.manual_seed(1)
    overwritten = value.clone()
    result = form(overwritten, *args)
    assert result.data_ptr() == overwritten.data_ptr()
    assert torch.equal(result, expected)


BACKWARD: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.threshold_backward.default, (0,)),
    (aten.hardtanh_backward.default, (-0.5, 0.5)),
    (aten.leaky_relu_backward.default, (0.1, False)),
    (aten.gelu_backward.default, ()),
    (aten.silu_backward.default, ()),
    (aten.sigmoid_backward.default, ()),
    (aten.tanh_backward.default, ()),
    (aten.softplus_backward.default, (1.0, 20.0)),
    (aten.hardsigmoid_backward.default, ()),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("target", "rest"), BACKWARD, ids=[str(target) for target, _ in BACKWARD])
def test_a_gradient_written_over_the_one_it_starts_from_has_the_same_bits(
    target: Any, rest: tuple[Any, ...], dtype: torch.dtype
) -> None:
    gradient, value = torch.randn(371, 113).to(dtype), torch.randn(371, 113).to(dtype)
    assert_same_into_first(target, gradient, value, *rest)


def test_the_gradient_of_elu_written_over_the_one_it_starts_from_has_the_same_bits() -> None:
    gradient, value = torch.randn(371, 113), torch.randn(371, 113)
    assert_same_into_first(aten.elu_backward.default, gradient, 0.7, 1.1, 0.9, False, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (7, 4097), (513, 130), (4, 6, 70, 71), (2, 1)], ids=str)
def test_a_softmax_of_any_axis_written_over_its_input_has_the_same_bits(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for axis in range(len(shape)):
        value, gradient = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        for forward, backward in (
            (aten._softmax.default, aten._softmax_backward_data.default),
            (aten._log_softmax.default, aten._log_softmax_backward_data.default),
        ):
            result = forward(value, axis, False)
            assert_same_into_first(forward, value, axis, False)
            assert_same_into_first(backward, gradient, result, axis, dtype)


def assert_same_into_first(target: Any, first: torch.Tensor, *args: Any) -> None:
    form = in_place_form(target)
    assert form is not None
    expected = target(first, *args)
    overwritten = first.clone()
    result = form(overwritten, *args)
    assert result.data_ptr() == overwritten.data_ptr()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", [1.1283791670955126, 0.3, 3.7])
def test_a_product_with_a_number_rounds_16_bit_values_once(number: float, dtype: torch.dtype) -> None:
    values = torch.randn(72, 16).to(dtype)
    assert torch.equal(in_place_form(aten.mul.Scalar)(values.clone(), number), aten.mul.Scalar(values, number))
