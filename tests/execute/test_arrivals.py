"""Outputs that get no gradient leave the parameters behind them as they are."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit

Outputs = tuple[torch.Tensor, ...]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 32)
        self.one, self.two, self.three = (nn.Linear(32, 4) for _ in range(3))

    def forward(self, batch: torch.Tensor) -> Outputs:
        hidden = F.gelu(self.trunk(batch))
        return self.one(hidden), self.two(hidden).relu(), torch.cat([self.two(hidden), self.three(hidden)])


LOSSES: dict[str, Callable[[Outputs], torch.Tensor]] = {
    "first": lambda outputs: outputs[0].square().mean(),
    "second": lambda outputs: outputs[1].square().mean(),
    "third": lambda outputs: outputs[2].square().mean(),
    "two of them": lambda outputs: outputs[0].mean() + outputs[2].square().mean(),
    "all": lambda outputs: sum((each.square().mean() for each in outputs), torch.zeros(())),
}


@pytest.mark.parametrize("budget", [0.99, "smallest"])
@pytest.mark.parametrize("names", [(name,) * 3 for name in LOSSES] + [("first", "third", "all", "second")])
def test_gradients_are_none_where_those_of_the_eager_run_are(names: tuple[str, ...], budget: float | str) -> None:
    torch.manual_seed(0)
    plain, fitted = Heads(), Heads()
    fitted.load_state_dict(plain.state_dict())
    memfit.fit(fitted, torch.randn(32, 16), budget, time_limit=1, progress=False)
    optimizers = [torch.optim.AdamW(each.parameters(), weight_decay=0.1) for each in (plain, fitted)]
    for name in names:
        batch = torch.randn(32, 16)
        for model, optimizer in zip((plain, fitted), optimizers, strict=True):
            optimizer.zero_grad()
            LOSSES[name](model(batch)).backward()
        for one, other in zip(plain.parameters(), fitted.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert memfit.captures_of(fitted).count == 1


@pytest.mark.filterwarnings("ignore:several calls go back")
def test_two_calls_in_one_step_each_know_their_own() -> None:
    torch.manual_seed(0)
    plain, fitted = Heads(), Heads()
    fitted.load_state_dict(plain.state_dict())
    batches = torch.randn(2, 32, 16)
    memfit.fit(fitted, batches[0], 0.99, progress=False)
    for model in (plain, fitted):
        one, other = model(batches[0]), model(batches[1])
        (one[0].square().mean() + other[2].square().mean()).backward()
    for own, planned in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert own.grad is not None
        assert planned.grad is not None
        assert torch.equal(own.grad, planned.grad)


@pytest.mark.parametrize("kernels", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_model_fitted_with_a_sum_trains_by_any_other_loss(turned: bool, kernels: str) -> None:
    """See Note [Another loss]: the backward pass of a sum reads one number of the gradient."""
    torch.manual_seed(0)

    class Turned(nn.Sequential):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = super().forward(batch)
            return made.unflatten(1, (2, 2)).transpose(0, 1).flatten(1) if turned else made

    plain = Turned(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    fitted = Turned(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    fitted.load_state_dict(plain.state_dict())
    batch = torch.randn(32, 16)
    memfit.fit(fitted, batch, "smallest", loss=lambda model, x: model(x).sum(), kernels=kernels, progress=False)
    for loss in (torch.sum, lambda output: output.square().mean(), torch.sum, torch.mean):
        for model in (plain, fitted):
            model.zero_grad()
            loss(model(batch)).backward()
        for one, other in zip(plain.parameters(), fitted.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    assert memfit.captures_of(fitted).count == 1


class Rays(nn.Module):
    """Outputs whose gradients are added up, and written over, where both arrive."""

    def __init__(self, reshapes: bool) -> None:
        super().__init__()
        self.linear, self.reshapes = nn.Linear(4, 8), reshapes

    def forward(self, batch: torch.Tensor) -> Outputs:
        hidden = self.linear(batch)
        weights = hidden.sigmoid()
        if self.reshapes:
            weights = weights.unflatten(1, (2, 4)).transpose(0, 1).reshape(-1, 4)
        depths = torch.linspace(0, 1, weights.shape[-1])
        return (weights * weights.tanh()).sum(-1), (weights * depths).sum(-1), weights.sum(-1)


@pytest.mark.parametrize("reshapes", [False, True])
@pytest.mark.parametrize("taken", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_what_is_no_sum_for_want_of_a_gradient_is_not_written_over(taken: tuple[int, ...], reshapes: bool) -> None:
    torch.manual_seed(0)
    plain, fitted = Rays(reshapes), Rays(reshapes)
    fitted.load_state_dict(plain.state_dict())
    batch = torch.randn(5, 4)
    memfit.fit(fitted, batch, progress=False)
    for model in (plain, fitted):
        outputs = model(batch)
        sum((outputs[place].mean() for place in taken), torch.zeros(())).backward()
    for one, other in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


class WithItsSize(nn.Module):
    """The gradients of both outputs are added up, and the sum is written over where both arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = F.gelu(self.linear(batch))
        return output, output.square().mean()


@pytest.mark.parametrize("weighted", [False, True])
def test_a_gradient_that_arrives_alone_is_not_written_over(weighted: bool) -> None:
    """It may be a tensor of the loop's own, or one number, expanded."""
    torch.manual_seed(0)
    plain, fitted = WithItsSize(), WithItsSize()
    fitted.load_state_dict(plain.state_dict())
    batch = torch.randn(32, 16)
    memfit.fit(fitted, batch, "smallest", backward_from="all", time_limit=1, progress=False)
    given = torch.randn(32, 32) if weighted else torch.ones(()).expand(32, 32)
    before = given.clone()
    for model in (plain, fitted):
        output, _ = model(batch)
        output.backward(given)
        assert torch.equal(given, before)
    for one, other in zip(plain.parameters(), fitted.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Turned(nn.Module):
    """The gradient of its first output alone is laid out otherwise than the sum of both is."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2, 1, 1))

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F.hardtanh((batch + self.bias).log_softmax(1))
        return scores.transpose(0, -1), scores[:1]


def test_what_arrives_alone_in_another_layout_is_written_over_by_no_kernel_that_takes_one_for_granted() -> None:
    """See Note [Nothing is written over in another layout]: the backward pass of log_softmax computed other numbers."""
    torch.manual_seed(0)
    plain, fitted = Turned(), Turned()
    batch = torch.randn(1, 2, 3, 3)
    memfit.fit(fitted, batch, "smallest", loss=lambda model, x: model(x)[0].square().mean(), progress=False)
    for model in (plain, fitted):
        model(batch)[0].square().mean().backward()
    assert plain.bias.grad is not None
    assert fitted.bias.grad is not None
    assert torch.equal(plain.bias.grad, fitted.bias.grad)
