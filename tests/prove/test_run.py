"""The user's own loop, with memfit and without."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.execute.attach import planned_forward

BATCHES = torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 4))


def train(model: nn.Module) -> Iterator[Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        for batch in BATCHES:
            loss = F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss, optimizer


def test_a_run_is_compared_with_all_it_makes_and_undone() -> None:
    model = memfit.fit(net(), BATCHES[0], 0.95, time_limit=1, progress=False)
    before = {name: state.clone() for name, state in model.state_dict().items()}
    generator = torch.get_rng_state()
    found = memfit.check_run(model, train, steps=6, progress=False)
    assert found.exact
    assert found.steps == 6
    parts = {each.part: each.compared for each in found.comparisons}
    assert parts == {
        "losses": 6,
        "parameters": 6,
        "gradients": 0,
        "buffers": 3,
        "optimizers": 18,
        "generator": 1,
    }
    assert all(torch.equal(model.state_dict()[name], state) for name, state in before.items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert planned_forward(model) is not None
    assert "6 steps of its loop with and without memfit: equal bit for bit" in str(found)


def test_what_differs_is_found_and_named() -> None:
    model = memfit.fit(net(), BATCHES[0], 0.95, time_limit=1, progress=False)
    planned = planned_forward(model)
    assert planned is not None
    ((call,),) = planned.calls.values()
    original = call.__class__.__call__

    class Wrong(type(call)):  # type: ignore[misc]
        def __call__(self, *given: Any) -> Any:
            return original(self, *given) * 1.0001

    call.__class__ = Wrong
    found = memfit.check_run(model, train, steps=3, progress=False)
    assert not found.exact
    assert "DIFFERENT" in str(found)
    losses = next(each for each in found.comparisons if each.part == "losses")
    assert losses.equal < losses.compared


def test_a_model_without_memfit_and_a_loop_without_losses_are_refused() -> None:
    with pytest.raises(memfit.InvalidInput, match="does not run through memfit"):
        memfit.check_run(net(), train)
    model = memfit.fit(net(), BATCHES[0], 0.95, time_limit=1, progress=False)
    with pytest.raises(memfit.InvalidInput, match="yields no loss"):
        memfit.check_run(model, lambda _model: iter(()), progress=False)
