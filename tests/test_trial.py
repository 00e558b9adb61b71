import copy
import math
import shutil
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import memfit
from memfit import runner, trial, ways
from memfit.capture.sample import Sample
from memfit.recipe import EXACT, Recipe
from memfit.trial import can_run_steps, seconds_by_call


class Net(nn.Module):
    """With a buffer, dropout, a tied weight, and a keyword; the elementwise operators make stretches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout()
        self.last = nn.Linear(16, 16, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(torch.sigmoid(x) * scale)) + 1
        return self.last(self.drop(torch.tanh(self.norm(x)) * 2)).square().mean()


def sample() -> dict[str, torch.Tensor]:
    """Tensors of which the first is cut out of a bigger one."""
    return {"x": torch.linspace(-1, 1, 64 * 20).view(64, 20)[:, 2:18], "scale": torch.ones(16)}


RECIPE = Recipe(budget=1000, allow=EXACT)


class Slow:
    """Stands in for a captured call, and takes a while."""

    changes_only_buffers = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, states: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        time.sleep(self._seconds)
        return states[0].square().sum() * kwargs["scale"].mean()


class Broken(Slow):
    def __call__(self, *_: Any) -> Any:
        raise RuntimeError("not here")


def test_every_call_is_timed() -> None:
    found = seconds_by_call(Net(), Sample.of(sample()), RECIPE, [Slow(0.05), Slow(0.0)])
    assert found is not None
    slow, fast = found
    assert slow > 0.05 > fast


def test_a_call_that_fails_leaves_it_to_predictions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert seconds_by_call(Net(), Sample.of(sample()), RECIPE, [Slow(0.0), Broken(0.0)]) is None
    assert "not here" in caplog.text


@pytest.fixture
def _always_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_AS_FAST", -math.inf)
    monkeypatch.setattr(ways, "_UNSURE", math.inf)
    monkeypatch.setattr(ways, "_MATTERS", -math.inf)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[float] | None]:
    """What trials found."""
    found: list[list[float] | None] = []

    def noted(*args: Any) -> list[float] | None:
        found.append(seconds_by_call(*args))
        return found[-1]

    monkeypatch.setattr(runner, "seconds_by_call", noted)
    return found


def loss_and_gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch)
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None), *model.buffers()]


@pytest.mark.usefixtures("one_thread", "_always_tried")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_compiled_and_eager_steps_are_run_and_nothing_remains(
    seen: list[list[float] | None], caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = Net(), sample()
    eager = copy.deepcopy(model)
    caplog.set_level("DEBUG", "memfit.ops.stretch")
    model.norm.weight.grad = before = torch.ones(16)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    given, generator = {name: each.clone() for name, each in batch.items()}, torch.get_rng_state()
    with torch.no_grad():
        memfit.fit(model, batch, "1GiB", kernels="inductor")
    assert len(seen) == 1
    assert seen[0] is not None
    assert len(seen[0]) == 2
    assert model.norm.weight.grad is before
    assert model.norm.bias.grad is None
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert all(torch.equal(each, given[name]) for name, each in batch.items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not [each for each in caplog.records if each.name == "memfit.ops.stretch"]  # no kernel gave up
    for mine, own in zip(loss_and_gradients(model, batch), loss_and_gradients(eager, batch), strict=True):
        torch.testing.assert_close(mine, own)


class Momentum(Net):
    """Its forward moves a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Parameter(torch.zeros(16), requires_grad=False)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.slow.add_(1.0)
        return super().forward(x, scale=scale)


@pytest.mark.usefixtures("one_thread", "_always_tried")
def test_a_model_whose_forward_moves_parameters_is_not_tried(seen: list[list[float] | None]) -> None:
    model = Momentum()
    memfit.fit(model, sample(), "1GiB", kernels="inductor")
    assert seen == [None]
    assert not model.slow.any()
    model(**sample())
    assert torch.equal(model.slow, torch.ones(16))


def test_no_steps_where_others_would_notice() -> None:
    batch = Sample.of(sample())
    assert can_run_steps(Net(), batch, RECIPE)
    assert not can_run_steps(Net(), batch, Recipe(budget="smallest", allow=EXACT))
    hooked = Net()
    hooked.register_forward_hook(lambda *_: None)
    assert not can_run_steps(hooked, batch, RECIPE)
    watched = Net()
    watched.norm.weight.register_hook(lambda _: None)
    assert not can_run_steps(watched, batch, RECIPE)
    updated = Net()
    updated.norm.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert seconds_by_call(updated, batch, RECIPE, [Slow(0.0)]) is None
    with FakeTensorMode():
        fake = Net()
    assert not can_run_steps(fake, batch, RECIPE)


def test_a_sample_out_of_a_bigger_graph_is_copied_without_it() -> None:
    (own,) = trial._own_copy(Sample.of(torch.ones(2, requires_grad=True) * 2)).tensors()
    assert own.is_leaf
    assert own.requires_grad
