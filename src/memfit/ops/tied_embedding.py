"""The gradient of an embedding added into that of the layer it shares its weight with.

A language model often multiplies its last hidden states with the embedding of every word. Its weight has two
gradients then, and eager makes both in full, words x width, to add them. But the embedding's own differs from zero only
in the rows of words that were in the batch: those are summed in a small table and added, row by row.
"""

import torch

from memfit.ops.lean import LeanOperator

aten = torch.ops.aten


def add_embedding_gradient(
    total: torch.Tensor, gradient: torch.Tensor, words: torch.Tensor, padding_word: int
) -> torch.Tensor:
    """`total` plus what `aten.embedding_dense_backward` makes of a gradient and the words it belongs to."""
    return add_embedding_gradient_(total.clone(), gradient, words, padding_word)


def add_embedding_gradient_(
    total: torch.Tensor, gradient: torch.Tensor, words: torch.Tensor, padding_word: int
) -> torch.Tensor:
    """The same, into `total`."""
    total.add_(0.0)  # what eager adds in all other rows: it makes -0.0 to 0.0
    if words.numel() == 0:
        return total
    words = words.reshape(-1)
    ordered, order = words.sort(stable=True)
    rows = torch.zeros_like(words)
    rows[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)  # of the table, by word in order
    row_of = torch.empty_like(rows).scatter_(0, order, rows)
    word_of = torch.zeros_like(words).scatter_(0, rows, ordered)  # of rows beyond the last: word 0, to which 0 is added
    table = aten.embedding_dense_backward(gradient.reshape(len(words), -1), row_of, len(words), -1, False)
    table.masked_fill_((word_of == padding_word).unsqueeze(1), 0.0)
    return total.index_add_(0, word_of, table)


TIED_EMBEDDING = LeanOperator(
    name="tied_embedding",
    technique="lean",
    keeps="the embedding's gradient as a row a word of the batch; the graph is rewritten, see `capture/tie.py`",
    exact=True,
    functions=(add_embedding_gradient,),
    alternatives=lambda _: (),
    in_place={add_embedding_gradient: add_embedding_gradient_},
)
