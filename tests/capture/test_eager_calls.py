"""Traces keep layouts, draws and roundings of what the eager run writes in place."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.errors import CaptureError


class Gru(nn.Module):
    """Gates of 8 elements are computed one by one in eager, and would be together in a trace."""

    def __init__(self, cells: bool) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 8, batch_first=True)
        self.cell = nn.GRUCell(8, 8) if cells else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, last = self.layer(x)
        return states.square().mean() if self.cell is None else self.cell(states[:, 0], last[0]).square().mean()


class Indexed(nn.Module):
    """`index_add_` keeps channels last; its functional form makes a contiguous result."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        x.index_add_(0, torch.zeros(1, dtype=torch.long), torch.ones_like(x[:1]))
        return x


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rrelu(self.linear(x).transpose(1, 2), training=True)


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model(batch).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("cells", [False, True], ids=["layer", "cell"])
@pytest.mark.parametrize("budget", [None, "smallest"])
def test_a_small_gru_has_the_bits_of_eager(cells: bool, budget: str | None) -> None:
    eager, batch = Gru(cells), torch.randn(4, 6, 8)
    fitted = memfit.fit(copy.deepcopy(eager), batch, budget, time_limit=0.2, remember=False, progress=False)
    assert all(map(torch.equal, gradients(fitted, batch), gradients(eager, batch)))


def test_what_is_written_in_place_keeps_its_layout() -> None:
    eager, batch = Indexed(), torch.randn(2, 4, 12, 12).contiguous(memory_format=torch.channels_last)
    fitted = memfit.fit(copy.deepcopy(eager), batch, None, progress=False)
    assert fitted(batch).stride() == eager(batch).stride()
    assert torch.equal(fitted(batch), eager(batch))


def test_draws_in_an_order_that_a_trace_loses_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"rrelu of a tensor that is not contiguous .* call contiguous\(\)"):
        memfit.fit(Random(), torch.randn(4, 6, 16), None, progress=False)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(16, 16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x.flip(-1))


def test_what_casts_inside_under_autocast_is_refused() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="bilinear under autocast casts"):
        memfit.fit(Product(), torch.randn(4, 16), None, progress=False)
    memfit.fit(Product(), torch.randn(4, 16), None, progress=False)


class Scaled(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(9)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t().t_(),
        lambda x: x.unsqueeze(0).transpose(1, 2).squeeze_(0),
        lambda x: torch.stft(x.flatten(), 16, window=torch.ones(16), return_complex=True).abs(),
    ],
    ids=["t_", "squeeze_", "stft"],
)
def test_what_is_seen_otherwise_in_place_is_not_written(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    eager, batch = Scaled(function), torch.randn(16, 9)
    fitted = memfit.fit(copy.deepcopy(eager), batch, remember=False, progress=False)
    assert torch.equal(eager(batch), fitted(batch))
    assert all(map(torch.equal, gradients(fitted, batch), gradients(eager, batch)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.prod(-1),
        lambda x: torch.linalg.qr(x)[0],
        lambda x: torch.linalg.cholesky(x.t() @ x + torch.eye(9)),
        lambda x: torch.linalg.eigvalsh(x.t() @ x),
    ],
    ids=["prod", "qr", "cholesky", "eigvalsh"],
)
def test_formulas_that_do_otherwise_in_a_trace_are_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match="computed otherwise in a trace"):
        memfit.fit(Scaled(function), torch.randn(16, 9), remember=False, progress=False)


def test_what_is_not_differentiated_is_not_refused() -> None:
    batch = torch.randn(16, 9)
    memfit.fit(Scaled(lambda x: x * x.detach().prod(-1, keepdim=True)), batch, remember=False, progress=False)
