"""What a step of one rank really takes beside what was predicted, on a model of a few megabytes."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import Case
from benchmarks.rank_case import STRATEGIES, measured, predicted


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(3)
        )
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


CASE = Case(
    name="layers",
    batch_size=256,
    make_model=Layers,
    make_batch=lambda size: (torch.randn(size, 64), torch.randint(10, (size,))),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    sample=lambda batch: (batch[0],),
)


def peaks() -> dict[str, tuple[int, int]]:
    """By strategy: predicted and measured."""
    found = {}
    for strategy in STRATEGIES:
        peak_bytes, plan = predicted(CASE, strategy)
        found[strategy] = peak_bytes, measured(CASE, strategy, plan)
    return found
