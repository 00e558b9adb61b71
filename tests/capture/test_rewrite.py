import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.capture.alternatives import extend
from memfit.capture.lower import lower
from memfit.capture.rewrite import rewrite
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.execute.attach import attach
from memfit.execute.compiled import CompiledCall
from memfit.ir import Graph, Kind
from memfit.ops import cross_entropy

VOCABULARY = 300


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "SLICE", 64 * 32)


class Words(nn.Module):
    """An embedding, a head, and a loss that is written out by the test."""

    def __init__(self, loss: Callable[..., torch.Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.head = nn.Linear(24, VOCABULARY, bias=bias)
        self.written = loss

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.written(self, words)


def plain(model: Words, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.head(model.embedding(words)).flatten(0, 1), words.flatten())


def summed(model: Words, words: torch.Tensor) -> torch.Tensor:
    logits = model.head(model.embedding(words)).view(-1, VOCABULARY)
    return F.cross_entropy(logits, words.view(-1), reduction="sum", ignore_index=7) / 3


def shifted(model: Words, words: torch.Tensor) -> torch.Tensor:
    logits = model.head(model.embedding(words))
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, VOCABULARY), words[:, 1:].reshape(-1))


def shifted_by_two(model: Words, words: torch.Tensor) -> torch.Tensor:
    logits = model.head(model.embedding(words))[:, 2:-3]
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), words[:, :-5].reshape(-1))


def upcast(model: Words, words: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return plain(model, words)


def smoothed(model: Words, words: torch.Tensor) -> torch.Tensor:
    logits = model.head(model.embedding(words)).flatten(0, 1)
    return F.cross_entropy(logits, words.flatten(), label_smoothing=0.1)


def weighted(model: Words, words: torch.Tensor) -> torch.Tensor:
    logits = model.head(model.embedding(words)).flatten(0, 1)
    return F.cross_entropy(logits, words.flatten(), torch.linspace(0, 1, VOCABULARY))


def not_reduced(model: Words, words: torch.Tensor) -> torch.Tensor:
    logits = model.head(model.embedding(words)).flatten(0, 1)
    return F.cross_entropy(logits, words.flatten(), reduction="none").square().mean()


def penalised(model: Words, words: torch.Tensor) -> torch.Tensor:
    logits = model.head(model.embedding(words)).flatten(0, 1)
    return F.cross_entropy(logits, words.flatten()) + logits.square().mean()


def scaled(model: Words, words: torch.Tensor) -> torch.Tensor:
    logits = model.head(model.embedding(words)).flatten(0, 1) / 2
    return F.cross_entropy(logits, words.flatten())


def words() -> torch.Tensor:
    return torch.randint(VOCABULARY, (3, 20))


def rewritten(model: nn.Module, sample: Any) -> tuple[bool, Graph]:
    with traced(model, Sample.of(sample)) as joint:
        return rewrite(joint), lower(joint)


def run_rewritten(model: nn.Module, sample: Any) -> nn.Module:
    """The model, running through its rewritten graphs."""

    def compiled(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledCall:
        with traced(model, Sample(args, kwargs), with_hooks=False) as joint:
            assert rewrite(joint)
            return CompiledCall(joint, lower(joint))

    call = Sample.of(sample)
    attach(model, compiled).capture(call.args, dict(call.kwargs))
    return model


def assert_equal_to_a_millionth(model: nn.Module, sample: Any, tolerance: float = 1e-6) -> None:
    twin = run_rewritten(copy.deepcopy(model), sample)
    call = Sample.of(sample)
    for each in (model, twin):
        torch.manual_seed(1)
        loss = each(*call.args, **call.kwargs)
        loss.backward()
        each.loss = loss.detach()
    torch.testing.assert_close(twin.loss, model.loss, rtol=tolerance, atol=0)
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            assert (one.grad - other.grad).norm() <= tolerance * other.grad.norm() + 1e-9


@pytest.mark.parametrize("loss", [plain, summed, shifted, shifted_by_two], ids=lambda each: each.__name__)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_with_cross_entropy_is_found_and_gives_the_same(loss: Any, bias: bool) -> None:
    assert_equal_to_a_millionth(Words(loss, bias=bias), words())


def test_the_same_under_autocast() -> None:
    assert_equal_to_a_millionth(Words(upcast), words(), tolerance=1e-2)


def test_a_tied_and_a_frozen_head() -> None:
    tied = Words(shifted)  # a word is not its own target, of which it would be all but certain
    tied.head.weight = tied.embedding.weight
    frozen = Words(plain)
    frozen.head.requires_grad_(False)
    only_head = Words(plain)
    only_head.embedding.requires_grad_(False)
    for model in (tied, frozen, only_head):
        assert_equal_to_a_millionth(model, words())


@pytest.mark.parametrize("loss", [smoothed, weighted, not_reduced, penalised, scaled], ids=lambda each: each.__name__)
def test_what_is_something_else_stays_as_it_is(loss: Any) -> None:
    model = Words(loss)
    with traced(model, Sample.of(words())) as joint:
        before = lower(joint)
        assert not rewrite(joint)
        assert lower(joint) == before


def test_logits_that_are_an_output_stay() -> None:
    def both(model: Words, words: torch.Tensor) -> Any:
        logits = model.head(model.embedding(words)).flatten(0, 1)
        return {"loss": F.cross_entropy(logits, words.flatten()), "logits": logits}

    assert not rewritten(Words(both), words())[0]


def test_few_logits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "SLICE", 60 * VOCABULARY)
    assert not rewritten(Words(plain), words())[0]


def test_nothing_of_the_size_of_the_logits_is_left() -> None:
    found, graph = rewritten(Words(plain), words())
    assert found
    assert all(each.size_bytes < 60 * VOCABULARY * 4 for each in graph.storages)
    forward, backward = [each for each in graph.operations if each.target.startswith("memfit.ops.cross_entropy:")]
    assert (forward.module, len(backward.outputs)) == ("", 3)
    kept = [graph.storages[index] for index in forward.outputs if index in backward.inputs]
    assert [(each.kind, each.size_bytes) for each in kept] == [(Kind.ACTIVATION, 4), (Kind.ACTIVATION, 2 * 60 * 4)]


class LossOnly(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=words, labels=words).loss
        return loss


def small(config: Any, **more: Any) -> Any:
    return config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **more)


def language_model(name: str) -> nn.Module:
    import transformers as t

    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    if name == "BERT":
        return LossOnly(t.BertForMaskedLM(small(t.BertConfig, **sizes)))
    if name == "Llama":
        return LossOnly(t.LlamaForCausalLM(small(t.LlamaConfig, **sizes, use_cache=False)))
    config = small(t.GPT2Config, n_layer=1, n_embd=32, n_head=2, use_cache=False)
    config.loss_type = "ForCausalLM"
    return LossOnly(t.GPT2LMHeadModel(config))


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT"])
def test_language_models_of_transformers(name: str) -> None:
    assert_equal_to_a_millionth(language_model(name), words(), tolerance=2e-6)


def test_the_name_of_the_technique_is_chunk() -> None:
    with traced(Words(plain), Sample.of(words())) as joint:
        extend(joint, ("lean",))
        assert not any("cross_entropy" in each.target for each in lower(joint).operations)
        extend(joint, ("chunk",))
        assert any("cross_entropy" in each.target for each in lower(joint).operations)
