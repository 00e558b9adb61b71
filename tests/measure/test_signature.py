import json
import math
from typing import Any

import pytest
import torch

from memfit import _torch
from memfit.errors import MemfitError
from memfit.measure.signature import decode, devices, encode, find_operator

ADD = torch.ops.aten.add.Tensor
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def round_trip(value: Any) -> Any:
    _, (read,), _ = decode(encode(ADD, (value,), {}))
    return read


def description(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    assert description(round_trip(tensor)) == description(tensor)
    assert round_trip(dtype) is dtype


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(2, 3).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(1, 3).expand(4, 3),
        torch.zeros(10)[::2],
    ],
    ids=["scalar", "empty", "transposed", "channels-last", "expanded", "every second"],
)
def test_shapes_and_strides_come_back(tensor: torch.Tensor) -> None:
    assert description(round_trip(tensor)) == description(tensor)


@pytest.mark.parametrize(
    "constant",
    [
        None,
        True,
        False,
        0,
        -3,
        2**62,
        1.0,
        1e-5,
        0.1,
        math.inf,
        -math.inf,
        "sum",
        [],
        [1, 2],
        [[1, None], [0.5]],
        torch.strided,
        torch.device("cpu"),
        torch.device("cuda", 1),
        torch.device("meta"),
        torch.channels_last,
        torch.contiguous_format,
        torch.preserve_format,
    ],
    ids=repr,
)
def test_constants_come_back(constant: object) -> None:
    read = round_trip(constant)
    assert read == constant
    assert type(read) is type(constant)


def test_not_a_number_comes_back() -> None:
    assert math.isnan(round_trip(math.nan))


def test_a_tuple_costs_what_a_list_costs() -> None:
    assert encode(ADD, ((1, 2),), {}) == encode(ADD, ([1, 2],), {})


def test_lists_of_tensors_come_back() -> None:
    tensors = [torch.zeros(2), None, torch.zeros(3, dtype=torch.int64)]
    read = round_trip(tensors)
    assert description(read[0]) == description(tensors[0])
    assert read[1] is None
    assert description(read[2]) == description(tensors[2])


def test_the_operator_and_its_keywords_come_back() -> None:
    operator, args, kwargs = decode(encode(ADD, (torch.ones(2), torch.ones(2)), {"alpha": 3}))
    assert operator is ADD
    assert kwargs == {"alpha": 3}
    assert operator(*args, **kwargs).shape == (2,)


def test_the_order_of_keywords_does_not_matter() -> None:
    one, two = (
        {"dtype": torch.int8, "device": torch.device("cpu")},
        {"device": torch.device("cpu"), "dtype": torch.int8},
    )
    assert encode(ADD, (), one) == encode(ADD, (), two)


def test_a_fake_tensor_has_the_signature_of_a_real_one() -> None:
    with _torch.FakeTensorMode():
        fake = torch.zeros(2, 3).t()
    assert encode(ADD, (fake,), {}) == encode(ADD, (torch.zeros(2, 3).t(),), {})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, 2), torch.zeros(2, 2).t()),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(2, device="meta")),
        (1, 1.0),
        (1, True),
        (None, "None"),
        (torch.float32, "float32"),
    ],
    ids=["shape", "strides", "dtype", "device", "integer and float", "integer and bool", "none", "dtype and text"],
)
def test_different_arguments_have_different_signatures(one: object, other: object) -> None:
    assert encode(ADD, (one,), {}) != encode(ADD, (other,), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_made_up_numbers_are_neither_zero_nor_denormal(dtype: torch.dtype) -> None:
    assert (round_trip(torch.empty(3, dtype=dtype)) == 0.5).all()


def test_made_up_indices_are_valid_and_made_up_masks_let_through() -> None:
    assert (round_trip(torch.full((3,), 99)) == 0).all()
    assert round_trip(torch.zeros(3, dtype=torch.bool)).all()


def test_a_signature_is_one_line_of_json() -> None:
    text = encode(ADD, (torch.zeros(2), 1), {"alpha": 2})
    assert "\n" not in text
    assert json.loads(text)[0] == "aten.add.Tensor"


@pytest.mark.parametrize("name", ["aten.add.Tensor", "aten.relu.default", "aten.native_dropout_backward.default"])
def test_operators_are_found_by_name(name: str) -> None:
    assert str(find_operator(name)) == name


def test_an_operator_of_another_torch_is_not_found() -> None:
    with pytest.raises((AttributeError, MemfitError)):
        find_operator("aten.no_such_operator.default")


def test_devices_are_found_beside_words_among_keywords() -> None:
    zeros = {"dtype": torch.float64, "device": torch.device("cpu"), "layout": torch.strided}
    made = encode(torch.ops.aten.zeros.default, ([2],), zeros)
    assert devices(made) == [torch.device("cpu")]
    padded = encode(torch.ops.aten.div.Tensor_mode, (torch.ones(2), torch.ones(2)), {"rounding_mode": "trunc"})
    assert devices(padded) == [torch.device("cpu")]
    name, args, _ = json.loads(made)
    assert devices(json.dumps([name, args, {"device": {"device": "cpu"}, "mode": "trunc"}])) == [torch.device("cpu")]
