"""A case so small that its steps take no time."""

import torch
from torch import nn

from benchmarks.models import Case

CASE = Case(
    name="tiny",
    batch_size=256,
    make_model=lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)),
    make_batch=lambda size: torch.randn(size, 32),
    loss=lambda model, batch: model(batch).square().mean(),
    sample=lambda batch: (batch,),
)
