"""Steps that are compared with eager ones now and then."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.execute.attach import planned_forward

BATCH = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


class Branching(nn.Module):
    """Cannot be captured whole: asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.body(batch if (batch.sum() * self.body[0].bias.sum()) < 1e9 else batch / 2)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 4))


def branching() -> nn.Module:
    torch.manual_seed(0)
    return Branching()


def train(model: nn.Module, steps: int = 6) -> list[Any]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(BATCH), torch.zeros(len(BATCH), dtype=torch.long))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, *(each.detach().clone() for each in (*model.parameters(), *model.buffers()))]


@pytest.mark.parametrize("make", [net, branching])
def test_a_run_with_the_guard_on_is_the_plain_one(make: Any) -> None:
    model = memfit.verify_every(memfit.fit(make(), BATCH, 0.98, time_limit=1, progress=False), 2)
    found, plain = train(model), train(make())
    assert found[0] == plain[0]
    assert all(torch.equal(*pair) for pair in zip(found[1:], plain[1:], strict=True))
    assert planned_forward(model) is not None or memfit.captures_of(model).count


def test_a_difference_stops_the_run_and_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = memfit.verify_every(memfit.fit(net(), BATCH, 0.98, time_limit=1, progress=False), 3)
    planned = planned_forward(model)
    assert planned is not None
    ((call,),) = planned.calls.values()
    train(model, steps=2)
    original = type(call).__call__
    monkeypatch.setattr(type(call), "__call__", lambda *arguments: original(*arguments) * 1.001)
    with pytest.raises(memfit.ExecutionError, match=r"call 4 of the Sequential is not what eager makes(.|\n)*outputs"):
        train(model, steps=2)


def test_evaluation_is_not_counted_and_remove_ends_it() -> None:
    model = memfit.verify_every(memfit.fit(net(), BATCH, 0.95, time_limit=1, progress=False), 1)
    with torch.no_grad():
        model(BATCH)
    memfit.remove(model)
    train(model, steps=1)
    assert not model._forward_pre_hooks


def test_bad_input_is_refused() -> None:
    with pytest.raises(memfit.InvalidInput, match="does not run by a plan"):
        memfit.verify_every(net())
    model = memfit.fit(net(), BATCH, 0.95, time_limit=1, progress=False)
    with pytest.raises(memfit.InvalidInput, match="from 1 on, 0 was given"):
        memfit.verify_every(model, 0)
