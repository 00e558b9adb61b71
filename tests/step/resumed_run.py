"""A small run that saves after every step and goes on where it stood: `python resumed_run.py CHECKPOINT STEPS`."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import memfit


class Dropping(nn.Module):
    """Draws random numbers in every step."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, 4))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layers(features)
        return answer


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(number)
    return torch.randn(6, 8, generator=own), torch.randint(4, (6,), generator=own)


def classify(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_step(**options: object) -> memfit.Step:
    model = Dropping()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7])
    return memfit.Step(
        model,
        optimizer,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        scheduler=scheduler,
        **options,
    )


def main() -> None:
    path, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(3)
    step = make_step()
    if path.exists():
        step.load(path)
    print("training", flush=True)
    while step.position.batches < steps:
        step(batch_of(step.position.batches))
        step.save(path)


if __name__ == "__main__":
    main()
