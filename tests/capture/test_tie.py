import copy

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.alternatives import extend
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.tie import tie
from memfit.capture.trace import traced
from memfit.ops.registry import name_of
from memfit.ops.tied_embedding import add_embedding_gradient

aten = torch.ops.aten
VOCABULARY = 211


class Words(nn.Module):
    """A small language model whose head may share the embedding's weight."""

    def __init__(self, *, tied: bool = True, padding_word: int | None = None, by_frequency: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24, padding_idx=padding_word, scale_grad_by_freq=by_frequency)
        self.middle = nn.Linear(24, 24)
        self.head = nn.Linear(24, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.embedding(words)).tanh()
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), words.flatten())


def ties(model: nn.Module, words: torch.Tensor) -> bool:
    with traced(model, Sample.of(words)) as joint:
        return tie(joint)


def test_a_tied_embedding_has_one_gradient_which_is_made_in_place() -> None:
    with traced(Words(), Sample.of(torch.randint(VOCABULARY, (3, 9)))) as joint:
        extend(joint, ("lean",))
        graph = lower(joint)
    targets = [each.target for each in graph.operations]
    assert str(aten.embedding_dense_backward.default) not in targets
    (total,) = (each for each in graph.operations if each.target == name_of(add_embedding_gradient))
    assert total.may_overwrite in total.inputs
    assert len({gradient for _, gradient in graph.trained}) == len(graph.trained) == 3


@pytest.mark.parametrize("options", [{"tied": False}, {"by_frequency": True}])
def test_everything_else_stays_as_it_is(options: dict[str, bool]) -> None:
    assert not ties(Words(**options), torch.randint(VOCABULARY, (3, 9)))


@pytest.mark.parametrize("padding_word", [None, 5])
def test_planned_steps_equal_eager_steps(padding_word: int | None) -> None:
    eager = Words(padding_word=padding_word)
    words = torch.randint(VOCABULARY, (4, 16))
    planned = memfit.fit(copy.deepcopy(eager), words, budget="smallest", loop=memfit.Loop(gradients="kept"))
    for seed in (0, 1):  # the second time into gradients that are there
        torch.manual_seed(seed)
        batch = torch.randint(12, (4, 16))
        losses = [model(batch) for model in (eager, planned)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        for one, other in zip(eager.parameters(), planned.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
