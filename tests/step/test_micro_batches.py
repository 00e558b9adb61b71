"""Gradients of micro-batches and accumulated batches are those of the whole."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import (
    TiedNet,
    Words,
    assert_same_parameters,
    classify,
    gradients_of_backward,
    gradients_of_step,
    relative_error,
    rows,
    sentences,
    token_mean,
    token_sum,
    train_plainly,
    twins,
)

import memfit
from memfit.errors import InvalidInput
from memfit.step.batches import split_batch

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
LENGTHS = [9, 1, 4, 7, 2, 9, 3, 1]


def token_count(batch):
    return (batch["labels"] != -100).sum()


def token_pair(model, batch):
    mean = token_sum(model, batch)
    return mean.sum, mean.count


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_a_perceptron(pieces, dtype):
    model = TiedNet().to(dtype)
    features, labels = rows(17)
    batch = features.to(dtype), labels
    found = gradients_of_step(model, batch, classify, micro_batches=pieces)
    assert relative_error(found, gradients_of_backward(model, batch, classify)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pieces", [2, 3, 7])
@pytest.mark.parametrize("way", ["Mean", "pair", "weight"])
def test_sentences_of_unequal_lengths(pieces, dtype, way):
    model, batch = Words(dtype=dtype), sentences(LENGTHS)
    options = {"weight": token_count} if way == "weight" else {}
    loss = {"Mean": token_sum, "pair": token_pair, "weight": token_mean}[way]
    found = gradients_of_step(model, batch, loss, micro_batches=pieces, **options)
    assert relative_error(found, gradients_of_backward(model, batch, token_mean)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_gpt2_without_dropout(pieces, tiny_gpt2):
    model = tiny_gpt2().eval().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    batch = sentences(LENGTHS, vocabulary=100)

    def loss(model, batch):
        logits = model(input_ids=batch["words"]).logits.flatten(0, 1)
        return memfit.Mean(
            F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum"), token_count(batch)
        )

    def whole(model, batch):
        mean = loss(model, batch)
        return mean.sum / mean.count

    found = gradients_of_step(model, batch, loss, micro_batches=pieces)
    assert relative_error(found, gradients_of_backward(model, batch, whole)) <= 1e-6


def test_equal_weights_would_be_wrong():
    """The test above can fail: sentences counted alike give another gradient."""
    model, batch = Words(), sentences(LENGTHS)
    found = gradients_of_step(model, batch, token_mean, micro_batches=2)
    assert relative_error(found, gradients_of_backward(model, batch, token_mean)) > 1e-3


@pytest.mark.parametrize("pieces", [2, 5])
def test_sums(pieces):
    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    model, batch = TiedNet(), rows(11)
    found = gradients_of_step(model, batch, loss, micro_batches=pieces, reduction="sum")
    assert relative_error(found, gradients_of_backward(model, batch, loss)) <= 1e-6
    step = memfit.Step(model, torch.optim.SGD(model.parameters(), lr=0), loss, micro_batches=pieces, reduction="sum")
    assert torch.allclose(step(batch), loss(model, batch))


def test_the_loss_is_that_of_the_whole_batch():
    model, batch = Words(), sentences(LENGTHS)
    for loss in (token_sum, lambda model, batch: (token_sum(model, batch).sum, int(token_count(batch)))):
        step = memfit.Step(model, torch.optim.SGD(model.parameters(), lr=0.0), loss, micro_batches=3)
        found = step(batch)
        assert not found.requires_grad
        assert found.shape == ()
        assert torch.allclose(found, token_mean(model, batch))


def test_an_undivided_mean_of_one_piece_is_the_mean_bit_for_bit():
    plain, model = twins(Words())
    batches = [sentences(LENGTHS) for _ in range(5)]

    def divided(model, batch):
        mean = token_sum(model, batch)
        return mean.sum / mean.count

    losses = train_plainly(plain, torch.optim.AdamW(plain.parameters()), divided, batches)
    step = memfit.Step(model, torch.optim.AdamW(model.parameters()), token_sum)
    assert all(torch.equal(step(batch), loss) for batch, loss in zip(batches, losses, strict=True))
    assert_same_parameters(model, plain)


# Over a data loader


def joined(batches):
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


@pytest.mark.parametrize("update", ["after", "inside"])
@pytest.mark.parametrize("sizes", [[4, 4, 4], [5, 2, 4], [6, 6, 1]])
def test_accumulated_batches_are_one_big_batch(sizes, update):
    plain, model = twins(TiedNet().double())
    batches = [(features.double(), labels) for features, labels in map(rows, sizes)]
    train_plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.5), classify, [joined(batches)])
    step = memfit.Step(
        model, torch.optim.SGD(model.parameters(), lr=0.5), classify, accumulate=3, micro_batches=1, update=update
    )
    for batch in batches:
        assert step.position.updates == 0
        step(batch)
    assert step.position.updates == 1
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("update", ["after", "inside"])
def test_a_short_epoch_ends_with_an_update(update):
    plain, model = twins(TiedNet().double())
    batches = [(features.double(), labels) for features, labels in map(rows, [4, 4, 4, 4, 3])]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    train_plainly(plain, optimizer, classify, [joined(batches[:3]), joined(batches[3:])])
    step = memfit.Step(
        model, torch.optim.SGD(model.parameters(), lr=0.5), classify, accumulate=3, micro_batches=2, update=update
    )
    losses = list(step.epoch(batches))
    assert len(losses) == 5
    assert (step.position.updates, step.position.batches) == (2, 5)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
    step.flush()  # nothing is left
    assert step.position.updates == 2


def test_counts_that_are_not_known_before_the_end():
    """The first piece has no word to count at all."""
    model = Words(dtype=torch.float64)
    batch = sentences([5, 5, 1, 9])
    batch["labels"][:2] = -100
    found = gradients_of_step(model, batch, token_sum, micro_batches=2)
    assert relative_error(found, gradients_of_backward(model, batch, token_mean)) <= 1e-12


# Batches


@dataclasses.dataclass
class Batch:
    features: torch.Tensor
    names: list[str]
    scale: float = 2.0


def test_batches_of_every_kind_are_cut():
    features = torch.arange(10).view(5, 2)
    batch = {"pair": (features, [features]), "data": Batch(features, list("abcde")), "constant": torch.tensor(3)}
    first, second = split_batch(batch, 2)
    assert first["pair"][0].shape == (3, 2)
    assert second["pair"][1][0].tolist() == [[6, 7], [8, 9]]
    assert (second["data"].names, second["data"].scale) == (["d", "e"], 2.0)
    assert second["constant"] == 3


@pytest.mark.parametrize("batch", [(torch.ones(4), torch.ones(3)), "words", torch.tensor(1.0), {}])
def test_what_cannot_be_cut_says_so(batch):
    with pytest.raises(InvalidInput, match="cannot be split"):
        split_batch(batch, 2)


def test_a_batch_smaller_than_the_count():
    with pytest.raises(InvalidInput, match="3 samples cannot be cut into 4"):
        split_batch(torch.ones(3), 4)


def test_an_own_way_to_split():
    model, batch = TiedNet(), rows(6)
    text = ";".join(str(row) for row in range(6))

    def split(batch, pieces):
        words = batch.split(";")
        return [words[number::pieces] for number in range(pieces)]

    def loss(model, numbers):
        chosen = [int(number) for number in (numbers.split(";") if isinstance(numbers, str) else numbers)]
        return F.cross_entropy(model(batch[0][chosen]), batch[1][chosen])

    found = gradients_of_step(model, text, loss, micro_batches=2, split=split, weight=len)
    assert relative_error(found, gradients_of_backward(model, text, loss)) <= 1e-6


def test_any_object_is_a_batch_if_it_need_not_be_cut():
    model = TiedNet()
    features, labels = rows()
    step = memfit.Step(
        model, torch.optim.SGD(model.parameters()), lambda model, _: F.cross_entropy(model(features), labels)
    )
    step(object())


# Samples that see each other


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"accumulate": 2}])
def test_batch_norm_is_refused(options):
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(InvalidInput, match=r"'1' \(BatchNorm1d\)"):
        memfit.Step(model, optimizer, classify, **options)(rows())
    memfit.Step(model, optimizer, classify, allow=("batch-statistics",), **options)(rows())
    model[1].eval()
    memfit.Step(copy.deepcopy(model), optimizer, classify, **options)(rows())
