"""Small models for data-parallel runs, and how they are trained."""

import torch
import torch.nn.functional as F
from torch import nn


class Images(nn.Module):
    """Convolutions with batch statistics and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.first(pixels)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden.mean((2, 3)))


class Words(nn.Module):
    """A tied embedding, layer norms, and a layer that is never used."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(16, 16) if unused else None

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return Images() if kind == "images" else Words(unused=kind == "unused")


def make_batch(kind: str, number: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(100 + number)
    if kind == "images":
        return torch.randn(rows, 3, 8, 8, generator=own), torch.randint(5, (rows,), generator=own)
    words = torch.randint(40, (rows, 6), generator=own)
    return words, words.roll(-1, 1)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    scores = model(batch[0])
    return F.cross_entropy(scores.flatten(0, -2), batch[1].flatten())
