"""Which outputs a backward pass starts from, where the loss is computed outside of the model; with default options."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.measure.peak import measure_peak
from memfit.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("one_thread")
Loss = Callable[[nn.Module, Any], torch.Tensor]


class Quantized(nn.Module):
    """Returns a reconstruction and a scalar that is a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.codes = nn.Linear(12, 8), nn.Linear(8, 12), nn.Embedding(10, 8)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.encoder(rows)
        code = self.codes(torch.cdist(found, self.codes.weight).argmin(1))
        commitment = F.mse_loss(code, found.detach()) + 0.25 * F.mse_loss(found, code.detach())
        return self.decoder(found + (code - found).detach()), commitment


class Items(nn.Module):
    """Uses an embedding twice, as recommenders do with items that were bought and items that were not."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 8), nn.Embedding(30, 8)

    def forward(self, user: torch.Tensor, bought: torch.Tensor, other: torch.Tensor) -> Any:
        taste = self.users(user)
        return (taste * self.items(bought)).sum(-1), torch.einsum("bd,bkd->bk", taste, self.items(other))


class Answering(nn.Module):
    """Returns its loss beside logits, which are larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 2000)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(rows))
        return logits, logits.square().mean()


class Cache:
    """What a library returns beside its loss, such as keys and values for generation."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 12)) for _ in range(4)))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, Cache]:
        found = self.body(rows)
        return found.square().mean(), Cache(found)


def first(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(rows)[0]
    return loss


def both(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    found, commitment = model(rows)
    return F.mse_loss(found, rows) + commitment


def both_looked_at(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = both(model, rows)
    assert loss.item() >= 0
    return loss


def ranked(model: nn.Module, batch: Any) -> torch.Tensor:
    bought, other = model(*batch)
    return -F.logsigmoid(bought[:, None] - other).mean()


def own(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(rows)[1]
    return loss


def rows(count: int = 16) -> torch.Tensor:
    return torch.randn(count, 12)


def interactions() -> Any:
    return torch.randint(20, (8,)), torch.randint(30, (8,)), torch.randint(30, (8, 4))


def trained(model: nn.Module, batches: list[Any], loss: Loss) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        seen += [value.detach(), *(each.grad.clone() for each in model.parameters())]
    return [*seen, *(each.detach().clone() for each in model.parameters())]


@pytest.mark.parametrize(
    ("kind", "batch", "loss"),
    [
        (Quantized, rows, both),
        (Quantized, rows, both_looked_at),
        (Items, interactions, ranked),
        (Caching, functools.partial(rows, 64), first),
    ],
    ids=["a scalar beside what the loss reads", "a loss that looks at values", "an embedding used twice", "a cache"],
)
def test_a_loss_may_read_any_output(kind, batch, loss):
    torch.manual_seed(0)
    plain, sample = kind(), batch()
    fitted = memfit.fit(copy.deepcopy(plain), sample, "smallest", loss=loss, optimizer="adamw", time_limit=0.5)
    expected, found = trained(plain, [sample] * 3, loss), trained(fitted, [sample] * 3, loss)
    assert all(map(torch.equal, expected, found))
    fitted.zero_grad()
    run = measure_peak(lambda: loss(fitted, sample).backward(), resident=[fitted, sample])
    assert run.peak_bytes <= memfit.plan_of(fitted).budget_bytes


def test_a_plan_of_an_earlier_run_starts_from_the_same_outputs_and_so_do_calls_of_another_size():
    torch.manual_seed(0)
    plain, sample = Quantized(), rows()
    budget = memfit.plan(plain, sample, budget="smallest", loss=both, time_limit=0.5).budget_bytes
    batches = [sample, rows(4), sample]
    expected = trained(copy.deepcopy(plain), batches, both)
    for _ in range(2):
        fitted = memfit.fit(copy.deepcopy(plain), sample, budget, loss=both, time_limit=0.5)
        assert all(map(torch.equal, expected, trained(fitted, batches, both)))


def test_a_saved_plan_starts_from_the_same_outputs(tmp_path):
    torch.manual_seed(0)
    plain, sample = Quantized(), rows()
    memfit.plan(plain, sample, budget="smallest", loss=both, time_limit=0.5).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    fitted = memfit.apply(plan, copy.deepcopy(plain), sample)
    assert all(map(torch.equal, trained(plain, [sample] * 2, both), trained(fitted, [sample] * 2, both)))
    assert memfit.check(memfit.remove(fitted), plan, sample).exact


def test_a_loss_that_reads_the_models_own_alone_pays_for_no_gradient_of_the_logits():
    torch.manual_seed(0)
    model, sample = Answering(), torch.randn(64, 32)
    told = memfit.plan(model, sample, budget=1.0, loss=own)
    untold = memfit.plan(model, sample, budget=1.0)
    assert told.backward_from == untold.backward_from == "auto"
    everything = memfit.plan(
        model, sample, budget=1.0, loss=lambda model, rows: sum(each.mean() for each in model(rows))
    )
    assert everything.backward_from == "all"
