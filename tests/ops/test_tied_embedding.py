import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors_to_pack import assert_same_bits

from memfit.ops.tied_embedding import add_embedding_gradient, add_embedding_gradient_

aten = torch.ops.aten


def assert_same(total: torch.Tensor, gradient: torch.Tensor, words: torch.Tensor, padding_word: int) -> None:
    dense = aten.embedding_dense_backward(gradient, words, len(total), padding_word, False)
    expected = total + dense
    assert_same_bits(add_embedding_gradient(total, gradient, words, padding_word), expected)
    own = total.clone()
    assert add_embedding_gradient_(own, gradient, words, padding_word).data_ptr() == own.data_ptr()
    assert_same_bits(own, expected)


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    vocabulary=st.integers(1, 40),
    width=st.integers(1, 33),
    padding_word=st.integers(-1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_any_words_give_the_same_bits(
    shape: list[int], vocabulary: int, width: int, padding_word: int, dtype: torch.dtype
) -> None:
    words = torch.randint(vocabulary, shape)
    total, gradient = torch.randn(vocabulary, width).to(dtype), torch.randn(*shape, width).to(dtype)
    assert_same(total, gradient, words, padding_word)


def test_many_words_in_threads_give_the_same_bits() -> None:
    words = torch.randint(300, (40, 128))
    assert_same(torch.randn(5000, 64), torch.randn(40, 128, 64), words, -1)


@pytest.mark.parametrize("word", [0, 4])
def test_negative_zeros_and_special_values_give_the_same_bits(word: int) -> None:
    total = torch.tensor([[-0.0, 0.0, -0.0, float("nan"), float("inf")]] * 6)
    gradient = torch.tensor([[-0.0, -0.0, 0.0, 1.0, -float("inf")]] * 3)
    assert_same(total, gradient, torch.full((3,), word), -1)


def test_a_transposed_total_stays_transposed() -> None:
    total = torch.randn(7, 20).t()
    assert_same(total, torch.randn(5, 7), torch.randint(20, (5,)), -1)
