"""Gradients that arrive in another layout than outputs have are summed as in eager, to the bit."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit

pytestmark = pytest.mark.usefixtures("one_thread")


class Turned(nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states.transpose(1, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(16, 16),
    "relu": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()),
    "turned": lambda: nn.Sequential(nn.Linear(16, 16), Turned()),
    "batch norm": lambda: nn.Sequential(Turned(), nn.Conv1d(16, 16, 3), nn.BatchNorm1d(16), nn.ReLU(), Turned()),
    "group norm": lambda: nn.Sequential(Turned(), nn.Conv1d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)),
}
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of one number, expanded": lambda output: output.sum() * 0.3,
    "permuted": lambda output: output.permute(2, 0, 1).square().mean(),
    "transposed, flat": lambda output: output.transpose(0, 1).flatten(0, 1).square().sum(),
    "as it is": lambda output: output.square().sum(),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_eager(name: str) -> None:
    torch.manual_seed(0)
    plain, batch = MODELS[name](), torch.randn(33, 6, 16)
    fitted = memfit.fit(copy.deepcopy(plain), batch, "smallest", time_limit=0.1, progress=False)
    for loss in LOSSES.values():
        found = []
        for model in (plain, fitted):
            model.zero_grad()
            loss(model(batch)).backward()
            found.append([each.grad for each in model.parameters()])
        assert all(map(torch.equal, *found))
