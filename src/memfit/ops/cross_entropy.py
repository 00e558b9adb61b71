"""Linear and cross-entropy as one operator that never has all logits in memory.

A language model multiplies its last hidden states with the embedding of every word and takes
the cross-entropy of the result: rows x vocabulary numbers, kept several times over, and
often the peak of the step. Here a few thousand words are done at a time. The forward keeps two
numbers a row; the backward computes the logits again.

Note [Slices of the vocabulary]
    The logits are cut by words, not by rows: each slice of the weight and of its gradient is read
    and written once, and every element of that gradient is one sum over all rows, rounded as
    in the eager run. Sums over words are put together slice by slice in single precision (double for
    double), so results differ from the eager run's in the last bits.

Note [Two numbers a row]
    The largest logit of a row, and the logarithm of the sum of exponentials beside it. In one
    number, their sum, the small loss of a word that is all but certain would be rounded away.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memfit.ops.lean import LeanOperator

SLICE = 2**21  # logits at a time
_MEAN = 1  # how torch numbers the ways to reduce a loss; 2 is the sum


def loss_of_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss (of this dtype), number of rows that count, and by row two numbers, see Note [Two numbers a row]."""
    counts = target != ignore_index
    words = _checked(torch.where(counts, target, 0), len(weight))
    precise = _precise(dtype)
    largest = torch.full((len(hidden),), torch.finfo(precise).min, dtype=precise, device=hidden.device)
    right = torch.zeros_like(largest)
    total = torch.zeros_like(largest, dtype=torch.float64)  # beside the 1 of a word that is certain, little else
    for piece in _slices(hidden, weight):
        logits = _logits(hidden, weight, bias, piece).to(dtype).to(precise)
        place, inside = _places(words, piece)
        right = torch.where(inside, logits.gather(1, place.unsqueeze(1)).squeeze(1), right)
        larger = torch.maximum(largest, logits.amax(1))
        logits.sub_(larger.unsqueeze(1)).exp_()
        total = total.mul_(largest.sub_(larger).exp_()).add_(logits.sum(1, dtype=torch.float64))
        largest = larger
    total = total.log_().to(precise)
    loss = torch.where(counts, total - (right - largest), 0).sum()
    number = counts.sum().to(precise)
    if reduction == _MEAN:
        loss = loss / number
    return loss.to(dtype), number, torch.stack((largest, total))


def gradients_of_linear(
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    number: torch.Tensor,
    of_rows: torch.Tensor,
    reduction: int,
    ignore_index: int,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of hidden states, weight and bias (as one row), those that are wanted."""
    dtype, precise = gradient.dtype, of_rows.dtype
    largest, total = of_rows.unsqueeze(2)
    counts = target != ignore_index
    words = torch.where(counts, target, 0)
    factor = gradient.to(precise)
    factors = torch.where(counts, factor / number if reduction == _MEAN else factor, 0).unsqueeze(1)
    of_hidden = torch.zeros_like(hidden, dtype=_precise(hidden.dtype)) if wanted[0] else None
    of_weight = torch.empty_like(weight) if wanted[1] else None
    of_bias = weight.new_empty(1, len(weight)) if wanted[2] else None
    for piece in _slices(hidden, weight):
        logits = _logits(hidden, weight, bias, piece).to(dtype).to(precise)
        place, inside = _places(words, piece)
        logits.sub_(largest).sub_(total).exp_()
        logits.scatter_add_(1, place.unsqueeze(1), inside.to(precise).neg_().unsqueeze(1))
        of_logits = logits.mul_(factors).to(dtype).to(hidden.dtype)
        del logits
        if of_hidden is not None:
            _add_product(of_hidden, of_logits, weight[piece])
        if of_weight is not None:
            torch.mm(of_logits.t(), hidden, out=of_weight[piece])
        if of_bias is not None:
            torch.sum(of_logits, 0, keepdim=True, out=of_bias[:, piece])
    return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias


def flops(function: Any, args: Sequence[Any]) -> int:
    """Of a call of one of the two: products of hidden states with the weight, and others of the same size."""
    if function not in (loss_of_linear, gradients_of_linear):
        return 0
    hidden, weight, products = (args[0], args[1], 1) if function is loss_of_linear else (*args[1:3], 3)
    return int(2 * products * hidden.numel() * len(weight))


def _slices(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
    length = max(64, SLICE // max(1, len(hidden)))
    return (slice(start, min(start + length, len(weight))) for start in range(0, len(weight), length))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, piece: slice) -> torch.Tensor:
    words = weight[piece].t()
    return torch.mm(hidden, words) if bias is None else torch.addmm(bias[piece], hidden, words)


def _places(words: torch.Tensor, piece: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """For every row: the place of its word in this slice, and whether it is there at all."""
    inside = (words >= piece.start) & (words < piece.stop)
    return (words - piece.start).clamp_(0, piece.stop - piece.start - 1), inside


def _add_product(result: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if result.dtype is left.dtype:
        result.addmm_(left, right)
    else:
        result.add_(torch.mm(left, right))


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _checked(words: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The words as they are; one that is not in the vocabulary raises, as in the eager run."""
    torch.ones((), device=words.device).expand(vocabulary).index_select(0, words)
    return words


CROSS_ENTROPY = LeanOperator(
    name="cross_entropy",
    technique="chunk",
    keeps="two numbers a row instead of the logits and their softmax; the graph is rewritten, see `capture/rewrite.py`",
    exact=False,
    functions=(loss_of_linear, gradients_of_linear),
    alternatives=lambda _: (),
)
