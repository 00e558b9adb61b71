"""The tiny models that patterns are made of."""

import torch
from torch import nn


class Net(nn.Module):
    """Two linear layers; patterns write what is `between`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(torch.tanh(self.first(batch))))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(hidden)


class Normed(Net):
    """With batch normalisation, layer normalisation and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(32)
        self.ln = nn.LayerNorm(32)
        self.dropout = nn.Dropout(0.2)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.ln(torch.relu(self.bn(hidden))))


class Blocks(nn.Module):
    """Three residual blocks, a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(batch)
        for place, block in enumerate(self.blocks):
            if self.is_kept(place):
                hidden = hidden + block(hidden)
        return hidden

    def is_kept(self, place: int) -> bool:
        return True


class Words(nn.Module):
    """An embedding, a layer, and scores for every word."""

    def __init__(self, *, tied: bool = False, padding: int | None = None, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16, padding_idx=padding, sparse=sparse)
        self.layer = nn.Linear(16, 16)
        self.scores = nn.Linear(16, 40, bias=False)
        if tied:
            self.scores.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.scores(torch.tanh(self.layer(self.embedding(words))))


class Conv(nn.Module):
    """A convolution with batch normalisation, pooled into scores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.bn(self.conv(images))).mean((2, 3)))


def words(number: int, length: int = 12) -> torch.Tensor:
    """The batch of a step: sentences of words."""
    return torch.randint(0, 40, (16, length), generator=torch.Generator().manual_seed(number))


def loss_of_words(scores: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
