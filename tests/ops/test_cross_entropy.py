from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memfit.ops import cross_entropy
from memfit.ops.cross_entropy import flops, gradients_of_linear, loss_of_linear

REDUCTIONS = {"mean": 1, "sum": 2}
IGNORED = -100


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "SLICE", 64 * 70)  # slices of 64 to 70 words


def case(rows: int = 70, vocabulary: int = 300, width: int = 24, bias: bool = True) -> list[Any]:
    """Hidden states, weight, bias and targets, some of them ignored."""
    target = torch.randint(vocabulary, (rows,))
    target[::5] = IGNORED
    parameters = [torch.randn(rows, width), torch.randn(vocabulary, width) * 0.3]
    return [*parameters, torch.randn(vocabulary) if bias else None, target]


def eager(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, reduction: str
) -> list[torch.Tensor]:
    """Loss and gradients of the plain run, for a gradient of 0.7."""
    leaves = [each.detach().clone().requires_grad_() for each in (hidden, weight, bias) if each is not None]
    logits = F.linear(*leaves)
    loss = F.cross_entropy(logits.float() if logits.element_size() < 8 else logits, target, reduction=reduction)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, 0.7))]


def chunked(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, reduction: str
) -> list[torch.Tensor]:
    dtype = torch.float64 if hidden.dtype is torch.float64 else torch.float32
    constants = (REDUCTIONS[reduction], IGNORED)
    loss, number, of_rows = loss_of_linear(hidden, weight, bias, target, *constants, dtype)
    gradient = torch.full_like(loss, 0.7)
    wanted = [True, True, bias is not None]
    gradients = gradients_of_linear(gradient, hidden, weight, bias, target, number, of_rows, *constants, wanted)
    results = [loss, *(each for each in gradients if each is not None)]
    if bias is not None:
        results[-1] = results[-1].view(-1)
    return results


def errors(results: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    return [
        ((one.double() - other.double()).norm() / other.double().norm()).item()
        for one, other in zip(results, expected, strict=True)
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_single_precision_is_equal_to_a_millionth_and_as_accurate(reduction: str, bias: bool) -> None:
    arguments = case(bias=bias)
    plain, ours = eager(*arguments, reduction), chunked(*arguments, reduction)
    assert max(errors(ours, plain)) <= 1e-6
    exact = eager(
        *(each.double() if i < 3 and each is not None else each for i, each in enumerate(arguments)), reduction
    )
    for own, eagers in zip(errors(ours, exact), errors(plain, exact), strict=True):
        assert own <= 1.5 * eagers + 1e-7


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_double_precision_stays_double(reduction: str) -> None:
    arguments = [each.double() if each.is_floating_point() else each for each in case()]
    assert max(errors(chunked(*arguments, reduction), eager(*arguments, reduction))) < 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_accurate_as_the_eager_run(dtype: torch.dtype) -> None:
    arguments = [each.to(dtype) if each.is_floating_point() else each for each in case()]
    plain, ours = eager(*arguments, "mean"), chunked(*arguments, "mean")
    assert [each.dtype for each in ours] == [each.dtype for each in plain]
    exact = eager(*(each.double() if each.is_floating_point() else each for each in arguments), "mean")
    for own, eagers in zip(errors(ours, exact), errors(plain, exact), strict=True):
        assert own <= 1.5 * eagers + 1e-6


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 128, 1000])
def test_any_vocabulary(vocabulary: int) -> None:
    arguments = case(vocabulary=vocabulary)
    for own, other in zip(chunked(*arguments, "mean"), eager(*arguments, "mean"), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, bias, target = case()
    arguments = (hidden * 100, weight, bias, target)
    assert max(errors(chunked(*arguments, "mean"), eager(*arguments, "mean"))) < 1e-5


def test_words_that_are_masked_out() -> None:
    hidden, weight, bias, target = case()
    bias[:70] = -torch.inf
    target[target != IGNORED] = target[target != IGNORED].clamp(min=70)
    assert (
        max(errors(chunked(hidden, weight, bias, target, "mean"), eager(hidden, weight, bias, target, "mean"))) < 1e-6
    )


def test_when_every_row_is_ignored_the_mean_is_not_a_number_and_the_sum_zero() -> None:
    hidden, weight, bias, target = case()
    target.fill_(IGNORED)
    assert chunked(hidden, weight, bias, target, "mean")[0].isnan()
    loss, *gradients = chunked(hidden, weight, bias, target, "sum")
    assert loss == 0
    assert not any(each.any() for each in gradients)


def test_not_a_number_is_not_hidden() -> None:
    hidden, weight, bias, target = case()
    hidden[3, 3] = torch.nan
    assert all(each.isnan().any() for each in chunked(hidden, weight, bias, target, "mean"))


@pytest.mark.parametrize("word", [300, 5000, -1])
def test_a_word_outside_the_vocabulary_raises(word: int) -> None:
    hidden, weight, bias, target = case()
    target[3] = word
    with pytest.raises(IndexError):
        chunked(hidden, weight, bias, target, "mean")


def test_only_what_is_wanted_is_computed() -> None:
    hidden, weight, bias, target = case()
    loss, number, of_rows = loss_of_linear(hidden, weight, bias, target, 1, IGNORED, torch.float32)
    wanted = [True, False, False]
    of_hidden, of_weight, of_bias = gradients_of_linear(
        loss, hidden, weight, bias, target, number, of_rows, 1, IGNORED, wanted
    )
    assert of_hidden is not None
    assert (of_weight, of_bias) == (None, None)


def test_the_forward_keeps_two_numbers_a_row() -> None:
    hidden, weight, bias, target = case()
    loss, number, of_rows = loss_of_linear(hidden, weight, bias, target, 1, IGNORED, torch.float32)
    assert (loss.shape, number.shape, of_rows.shape) == ((), (), (2, 70))


def test_arithmetic_is_counted() -> None:
    arguments = case()
    assert flops(loss_of_linear, arguments) == 2 * 70 * 24 * 300
    assert flops(gradients_of_linear, [None, *arguments]) == 3 * 2 * 70 * 24 * 300
    assert flops(torch.mm, arguments) == 0


def test_a_small_loss_is_not_rounded_away() -> None:
    words = torch.eye(100) * 4
    arguments = (words, words, None, torch.arange(100))
    plain, ours = eager(*arguments, "mean"), chunked(*arguments, "mean")
    exact = eager(words.double(), words.double(), None, torch.arange(100), "mean")
    assert plain[0] < 1e-4
    for own, eagers in zip(errors(ours, exact), errors(plain, exact), strict=True):
        assert own <= 1.5 * eagers + 1e-7
