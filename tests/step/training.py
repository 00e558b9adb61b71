"""Small models, batches and the plain eager step that every technique is compared with."""

import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn

import memfit


class TiedNet(nn.Module):
    """A residual net with a weight that is used twice, no dropout, and a parameter that nothing uses."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.inner = nn.Linear(width, width)
        self.again = nn.Linear(width, width)
        self.again.weight = self.inner.weight
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 4)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(features))
        hidden = self.norm(hidden + torch.tanh(self.again(torch.relu(self.inner(hidden)))))
        answer: torch.Tensor = self.last(hidden)
        return answer


class Words(nn.Module):
    """A small language model over positions with padding."""

    def __init__(self, vocabulary: int = 23, width: int = 12, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mixer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.mixer(self.embedding(words))[0])
        return answer


def classify(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def token_mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over all tokens that are not padding, as the whole batch has it."""
    return F.cross_entropy(model(batch["words"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def token_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> memfit.Mean:
    labels = batch["labels"].flatten()
    losses = F.cross_entropy(model(batch["words"]).flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return memfit.Mean(losses, (labels != -100).sum())


def rows(count: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 8), torch.randint(4, (count,))


def sentences(lengths: list[int], vocabulary: int = 23) -> dict[str, torch.Tensor]:
    """Sentences of unequal lengths, padded."""
    words = torch.randint(vocabulary, (len(lengths), max(lengths)))
    labels = torch.randint(vocabulary, words.shape)
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return {"words": words, "labels": labels}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    parameters = list(model.parameters())
    decayed, others = [each for each in parameters if each.dim() > 1], [each for each in parameters if each.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3, "weight_decay": 0.0}], lr=1e-2
    )


def train_plainly(model, optimizer, loss, batches, scheduler=None, clip_norm=None, dtype=None, pieces=1):
    """The oracle: what everybody writes."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        for piece in zip(*(part.tensor_split(pieces) for part in batch), strict=True) if pieces > 1 else [batch]:
            with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
                value = loss(model, piece)
            (value / pieces).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(value.detach())
    return losses


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)


def gradients_of_step(model, batch, loss, **options):
    """The gradients that an update sees."""
    seen = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: seen.update(
            {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        )
    )
    memfit.Step(model, optimizer, loss, **options)(batch)
    return seen


def gradients_of_backward(model, batch, loss):
    model.zero_grad()
    loss(model, batch).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of all gradients together, by norm."""
    assert found.keys() == expected.keys()
    difference = torch.cat([(found[name] - expected[name]).flatten() for name in expected]).norm()
    return float(difference / torch.cat([each.flatten() for each in expected.values()]).norm())


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    assert ours["param_groups"] == theirs["param_groups"]
    for number, state in ours["state"].items():
        assert state.keys() == theirs["state"][number].keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs["state"][number][name])), name


def pairs(names: list[str]) -> list[tuple[str, ...]]:
    return [*((name,) for name in names), *itertools.combinations(names, 2)]
