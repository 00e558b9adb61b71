"""Parameters of several names: their gradients are added up as the eager run adds them, and when."""

import copy

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.alternatives import extend
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.ir import ACCUMULATE
from memfit.measure.peak import measure_peak
from memfit.ops.registry import name_of
from memfit.ops.tied_embedding import add_embedding_gradient
from memfit.recipe import EXACT

VOCABULARY = 401


class Translator(nn.Module):
    """Words of two languages and a head with one weight for all three, as T5 and BART have it."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, width)
        self.encoder_words = nn.Embedding(VOCABULARY, width)
        self.decoder_words = nn.Embedding(VOCABULARY, width)
        self.encoder, self.decoder = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for each in (self.encoder_words, self.decoder_words, self.head):
            each.weight = self.shared.weight

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        known = self.encoder(self.encoder_words(words)).tanh().mean(1, keepdim=True)
        hidden = self.decoder(self.decoder_words(labels)).tanh() + known
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def texts(tokens: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(40, (4, tokens)), torch.randint(40, (4, tokens))


def gradients(model: nn.Module, sample: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
    for _ in range(2):  # the second time into gradients that are there
        model(*sample).backward()
    return [each.grad for each in model.parameters()]


@pytest.mark.parametrize("allow", [EXACT, ("recompute",)])
def test_gradients_of_three_names_equal_those_of_eager_bit_for_bit(allow: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, sample = Translator(), texts()
    loop = memfit.Loop(gradients="kept")
    planned = memfit.fit(copy.deepcopy(model), sample, "smallest", allow=allow, loop=loop, remember=False)
    for one, other in zip(gradients(model, sample), gradients(planned, sample), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


class OneGradient(nn.Module):
    """A parameter of four names, of which all get the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = self.third = self.fourth = nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.first + self.second + self.third + self.fourth


def test_one_gradient_may_be_that_of_all_names() -> None:
    model, x = OneGradient(), torch.randn(7)
    planned = memfit.fit(copy.deepcopy(model), (x,), remember=False)
    for each in (model, planned):
        each(x).mul(torch.linspace(0.1, 0.7, 7)).sum().backward()
    assert model.first.grad is not None
    assert planned.first.grad is not None
    assert torch.equal(model.first.grad, planned.first.grad)


def test_the_graph_adds_them_as_they_are_made_and_hands_out_one() -> None:
    with traced(Translator(), Sample.of(texts())) as joint:
        plain = lower(joint)
        extend(joint, ("lean",))
        lean = lower(joint)
    for graph in (plain, lean):
        assert len({gradient for _, gradient in graph.trained}) == len(graph.trained) == 5
        assert ACCUMULATE not in {each.target for each in graph.operations if len(each.inputs) > 1}
    assert [each.target for each in lean.operations].count(name_of(add_embedding_gradient)) == 2


def test_no_more_than_two_of_them_are_there_at_once() -> None:
    model, sample = Translator(width=256), texts()
    eager_bytes = measure_peak(lambda: model(*sample).backward(), resident=[model, sample]).peak_bytes
    model.zero_grad()
    plan = memfit.plan(model, sample, budget="smallest")
    assert plan.peak_bytes < eager_bytes
