import pytest
import torch
from command_line import folder_with_net

import memfit
from memfit.cli import reference as references
from memfit.cli.samples import Input, build_sample, call_sample, parse_input, parse_inputs, parse_sample
from memfit.errors import InvalidSample


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return folder_with_net(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16x3x224x224", Input(shape=(16, 3, 224, 224))),
        ("7", Input(shape=(7,))),
        (" 1x2048:int64 ", Input(shape=(1, 2048), dtype=torch.int64)),
        ("input_ids=1x2048:int64", Input(shape=(1, 2048), name="input_ids", dtype=torch.int64)),
        ("mask=4:bool", Input(shape=(4,), name="mask", dtype=torch.bool)),
    ],
)
def test_an_input_is_a_shape_with_a_name_and_a_dtype_if_wanted(text, expected):
    assert parse_input(text) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("16x3x", "a size is missing"),
        ("", "a size is missing"),
        ("x3", "a size is missing"),
        ("0x3", "'0' is not a size"),
        ("-1x3", "'-1' is not a size"),
        ("axb", "'a' is not a size"),
        ("1.5x2", "'1.5' is not a size"),
        ("٣x2", "'٣' is not a size"),
        ("1,2", "'1,2' is not a size"),
        ("9" * 30, "is not a size"),
        ("999999999999x999999999999", "no machine holds"),
        ("1x2:int65", "'int65' is not a dtype"),
        ("1x2:", "'' is not a dtype"),
        ("1x2:Tensor", "'Tensor' is not a dtype"),
        ("a b=1x2", "'a b' cannot be the name"),
        ("=1x2", "'' cannot be the name"),
        ("a=b=1x2", "more than one"),
        ("1x2:int64:int64", "more than one"),
    ],
)
def test_a_malformed_input_is_refused_with_what_was_found(text, complaint):
    with pytest.raises(InvalidSample) as refused:
        parse_input(text)
    assert complaint in str(refused.value)
    assert repr(text) in str(refused.value)


def test_a_malformed_shape_is_answered_with_an_example():
    with pytest.raises(InvalidSample, match="16x3x224x224"):
        parse_input("16x3x")


def test_a_name_is_given_once():
    with pytest.raises(InvalidSample, match="a is given 2 times"):
        parse_inputs(["a=1", "b=1", "a=2"])


def test_positional_inputs_keep_their_order_and_named_ones_their_names():
    sample = build_sample(parse_inputs(["1x2", "mask=3:bool", "4x5:int64"]))
    assert [tuple(tensor.shape) for tensor in sample.args] == [(1, 2), (4, 5)]
    assert sample.kwargs["mask"].dtype is torch.bool


def test_a_dtype_is_for_inputs_that_do_not_say_their_own():
    sample = build_sample(parse_inputs(["1x2", "1x2:float32", "ids=1x2:int64"]), torch.bfloat16)
    assert [tensor.dtype for tensor in sample.tensors()] == [torch.bfloat16, torch.float32, torch.int64]


def called(text, dtype=None):
    reference = parse_sample(text)
    make = references.load(reference)
    with memfit.without_weights():
        return call_sample(reference, make, dtype)


def test_a_function_makes_the_sample():
    sample = called("./net.py:make_batch", torch.float16)
    assert tuple(sample.kwargs["x"].shape) == (4, 8)
    assert sample.kwargs["x"].dtype is torch.float16
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("./net.py:make_batch(3)", "called without arguments"),
        ("./net.py:makes_a_number", "gave a int without tensors"),
        ("./net.py:fails", "ValueError: a reason in two lines"),
        ("./net.py:no_such", "has no 'no_such'"),
        ("./no_such.py:make", "there is no file"),
        ("os:listdir", "standard library"),
    ],
)
def test_what_makes_no_sample_is_refused(text, complaint):
    with pytest.raises(InvalidSample) as refused:
        called(text)
    assert complaint in str(refused.value)
