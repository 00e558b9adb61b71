"""Gradients of outputs come in the layout in which a loss makes them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture.gradient_layouts import axes_of


class Images(nn.Module):
    """Its output has its channels last; the gradient of a flattened output is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.point = nn.Conv2d(8, 8, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.point(F.silu(self.deep(x)))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    rows = model(batch).flatten(1)
    return F.cross_entropy(rows, torch.arange(len(rows)))


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 8, 16, 16).contiguous(memory_format=torch.channels_last)


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss(model, batch).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("budget", [None, "smallest"])
def test_a_gradient_in_another_layout_gives_the_bits_of_eager_also_for_other_batches(budget) -> None:
    eager = Images()
    fitted = memfit.fit(
        copy.deepcopy(eager), images(2), budget, loss=loss, time_limit=0.2, remember=False, progress=False
    )
    for count in (2, 2, 1):
        batch = images(count)
        assert all(map(torch.equal, gradients(fitted, batch), gradients(eager, batch)))
        assert fitted(batch).stride() == eager(batch).stride()


class WithItsWeight(Images):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return super().forward(x), self.point.weight, x


def loss_of_weight(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output, weight, given = model(batch)
    rows = output.flatten(1)
    return F.cross_entropy(rows, torch.arange(len(rows))) + weight.square().mean() + given.mean()


def test_a_gradient_is_laid_out_as_it_comes_where_a_model_returns_what_it_was_given() -> None:
    torch.manual_seed(0)
    eager, batch = WithItsWeight(), images(2)
    fitted = copy.deepcopy(eager)
    memfit.fit(fitted, batch, loss=loss_of_weight, time_limit=0.2, remember=False, progress=False)
    for model in (eager, fitted):
        loss_of_weight(model, batch).backward()
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(eager.parameters(), fitted.parameters(), strict=True)
    )


def summed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum() / 8


def test_a_gradient_that_is_one_number_gives_the_bits_of_eager() -> None:
    eager, batch = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), torch.randn(48, 8)
    fitted = copy.deepcopy(eager)
    memfit.fit(fitted, batch, "smallest", loss=summed, time_limit=0.2, remember=False, progress=False)
    for model in (eager, fitted):
        summed(model, batch).backward()
    pairs = zip(eager.parameters(), fitted.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


class Counting(Images):
    """Changes a buffer too, and takes a root that is checked while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        root = torch.linalg.cholesky(torch.eye(8) * 4)
        return self.point(self.deep(x)) * root[0, 0]


def test_an_output_keeps_its_own_layout_beside_others() -> None:
    eager, batch = Counting(), images(2)
    fitted = memfit.fit(copy.deepcopy(eager), batch, None, loss=loss, progress=False)
    assert fitted(batch).stride() == eager(batch).stride()


def test_a_plan_that_was_saved_starts_from_the_same_layout(tmp_path) -> None:
    eager, batch = Images(), images(2)
    plan = memfit.plan(eager, batch, budget="smallest", loss=loss, time_limit=0.2, progress=False)
    plan.save(tmp_path / "plan.json")
    fitted = memfit.apply(memfit.Plan.load(tmp_path / "plan.json"), copy.deepcopy(eager), batch)
    assert all(map(torch.equal, gradients(fitted, batch), gradients(eager, batch)))


def test_a_loss_that_looks_at_values_is_no_obstacle() -> None:
    def looking(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value = model(batch).square().mean()
        return value if value.item() >= 0 else -value

    fitted = memfit.fit(Images(), images(2), "smallest", loss=looking, time_limit=0.2, remember=False, progress=False)
    assert memfit.plan_of(fitted) is not None


def test_axes_are_told_from_the_widest_stride_on() -> None:
    assert axes_of(torch.empty(2, 3, 4)) == (0, 1, 2)
    assert axes_of(torch.empty(2, 4, 3).transpose(1, 2)) == (0, 2, 1)
    assert axes_of(torch.empty(1).expand(2, 3)) == ()
    assert axes_of(torch.empty(2, 1).expand(2, 3)) is None
    assert axes_of(torch.empty(4, 6)[:, :3]) is None


class Windows(nn.Module):
    """Its output has elements that lie over each other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).unfold(1, 3, 1)


@pytest.mark.parametrize("budget", [None, "smallest"])
@pytest.mark.parametrize("told", [False, True], ids=["no loss", "loss"])
def test_the_gradient_of_an_output_that_overlaps_itself_is_that_of_eager(budget, told) -> None:
    weights = torch.randn(4, 7, 3)

    def weighted(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) * weights).sum()

    eager, batch = Windows(), torch.randn(4, 9)
    fitted = memfit.fit(
        copy.deepcopy(eager),
        batch,
        budget,
        loss=weighted if told else None,
        time_limit=0.2,
        remember=False,
        progress=False,
    )
    for model in (eager, fitted):
        weighted(model, batch).backward()
    assert torch.equal(eager.scale.grad, fitted.scale.grad)
    assert eager(batch).stride() == fitted(batch).stride()
