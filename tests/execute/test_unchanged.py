"""Writes behind autograd's back are seen where values are computed again from what was written into."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit

pytestmark = pytest.mark.usefixtures("one_thread")


def fitted() -> tuple[nn.Sequential, torch.Tensor]:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    batch = torch.randn(32, 16)
    return memfit.fit(model, batch, "smallest", time_limit=0.1, progress=False), batch


def halve(model: nn.Sequential, batch: torch.Tensor) -> None:
    model[0].bias.data.mul_(0.5)


def swap(model: nn.Sequential, batch: torch.Tensor) -> None:
    model[0].weight.data = torch.zeros(64, 16)


def reuse_the_buffer(model: nn.Sequential, batch: torch.Tensor) -> None:
    batch.numpy()[:] = 0


@pytest.mark.parametrize(("write", "what"), [(halve, "0.bias"), (swap, "0.weight"), (reuse_the_buffer, "argument 0")])
def test_a_write_is_refused_by_name(write: Callable[[nn.Sequential, torch.Tensor], None], what: str) -> None:
    model, batch = fitted()
    loss = model(batch).sum()
    write(model, batch)
    with pytest.raises(memfit.ExecutionError, match=f"^{what} was written into between forward and backward"):
        loss.backward()


def test_other_bytes_in_another_place_are_the_same_to_it() -> None:
    model, batch = fitted()
    loss = model(batch).sum()
    model[0].weight.data = model[0].weight.data.clone()
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_loss_that_is_kept_does_not_hold_the_batch() -> None:
    model, batch = fitted()
    kept = batch.clone()
    seen = torch.multiprocessing.reductions.StorageWeakRef(kept.untyped_storage())
    loss = model(kept).sum()
    loss.backward()
    del kept
    assert seen.expired()
    assert loss.item() == loss.item()
