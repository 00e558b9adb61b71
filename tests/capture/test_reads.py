"""Train fitted models whose forwards read and leave behind what they like."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit

SCALE = 1.0
Step = Callable[[Any, torch.Tensor, int], torch.Tensor]


@dataclasses.dataclass
class Settings:
    weight: float = 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 4)
        self.beta = 0.1
        self.factors = [1.0, 2.0]
        self.settings = Settings()
        self.activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.activation(self.first(batch))) * self.factors[1]
        loss = self.last(hidden).square().mean() * SCALE + self.beta * hidden.square().mean()
        return loss * self.settings.weight


def change_attribute(model: Net, number: int) -> None:
    model.beta = 0.1 * (number // 2)


def change_probability(model: Net, number: int) -> None:
    model.drop.p = 0.1 if number < 3 else 0.5


def change_held_object(model: Net, number: int) -> None:
    model.settings.weight = 0.5 + number // 3


def change_list(model: Net, number: int) -> None:
    model.factors[1] = 2.0 + number // 3


def change_function(model: Net, number: int) -> None:
    model.activation = F.gelu if number < 3 else F.relu


def change_global(_model: Net, number: int) -> None:
    global SCALE
    SCALE = 1.0 + number // 3


def trained(
    make: Callable[[], nn.Module], step: Step, *, fits: bool, budget: Any = "smallest"
) -> tuple[list[float], list[torch.Tensor | None], nn.Module]:
    """Losses and last gradients of six steps."""
    torch.manual_seed(0)
    model = make()
    batches = torch.randn(6, 32, 16, generator=torch.Generator().manual_seed(1))
    if fits:
        memfit.fit(model, batches[0], budget, time_limit=1, progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    torch.manual_seed(2)
    random.seed(2)
    losses = []
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = step(model, batch, number)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [each.grad for each in model.parameters()], model


def assert_trains_the_same(make: Callable[[], nn.Module], step: Step, **options: Any) -> nn.Module:
    losses, gradients, _ = trained(make, step, fits=False)
    own_losses, own_gradients, model = trained(make, step, fits=True, **options)
    assert own_losses == losses
    for one, other in zip(own_gradients, gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
    return model


@pytest.mark.parametrize(
    "change",
    [change_attribute, change_probability, change_held_object, change_list, change_function, change_global],
    ids=lambda change: change.__name__,
)
def test_what_changes_between_steps_is_seen(change: Callable[[Net, int], None]) -> None:
    def step(model: Net, batch: torch.Tensor, number: int) -> torch.Tensor:
        change(model, number)
        return model(batch)

    try:
        model = assert_trains_the_same(Net, step, budget=0.95)
    finally:
        change_global(Net(), 0)
    captures = memfit.captures_of(model)
    assert 2 <= captures.count <= 3  # one for a value


def test_an_equal_number_is_the_same() -> None:
    def step(model: Net, batch: torch.Tensor, _number: int) -> torch.Tensor:
        model.beta = float("0.1")  # another object
        return model(batch)

    assert memfit.captures_of(assert_trains_the_same(Net, step)).count == 1


def test_a_value_in_a_closure_is_seen() -> None:
    weight = 1.0

    class Scaled(nn.Linear):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return F.gelu(super().forward(batch)) * weight

    def step(model: nn.Module, batch: torch.Tensor, number: int) -> torch.Tensor:
        nonlocal weight
        weight = 1.0 + number // 3
        return model(batch).square().mean()

    assert_trains_the_same(lambda: Scaled(16, 4), step)


class Experts(nn.Module):
    """Leaves an auxiliary loss in a list, and another on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.losses: list[torch.Tensor] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(batch))
        self.losses.append(hidden.square().mean())
        self.mean, self.length = hidden.mean(), len(batch)
        output: torch.Tensor = self.last(hidden)
        return output


def test_what_a_forward_leaves_behind_is_there_with_its_gradients() -> None:
    def step(model: Experts, batch: torch.Tensor, _number: int) -> torch.Tensor:
        model.losses.clear()
        output = model(batch)
        assert model.length == len(batch)
        return output.square().mean() + sum(model.losses) + model.mean

    model = assert_trains_the_same(Experts, step)
    assert memfit.captures_of(model).count == 1


def test_nothing_is_left_by_the_capture_itself() -> None:
    model = Experts()
    memfit.fit(model, torch.randn(8, 16), 0.9, progress=False)
    assert model.losses == []
    assert not hasattr(model, "mean")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output: torch.Tensor = self.body(batch) / self.calls
        return output


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = self.layers[0](batch)
        for layer in self.layers[1:]:
            if random.random() < 0.5:
                batch = layer(batch)
        return batch


@pytest.mark.parametrize("make", [Counting, Dropping])
def test_what_is_carried_from_call_to_call_is_left_to_the_model(make: Callable[[], nn.Module]) -> None:
    model = assert_trains_the_same(make, lambda model, batch, _: model(batch).square().mean())
    plan = memfit.plan_of(model)
    assert plan is not None
    assert plan.regions


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.mask: torch.Tensor | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.arange(16.0)
        return F.gelu(self.first(batch) * self.mask)


def test_a_constant_that_is_made_once_does_no_harm() -> None:
    model = assert_trains_the_same(Caching, lambda model, batch, _: model(batch).square().mean())
    assert memfit.captures_of(model).count == 1


def test_a_global_that_the_forward_writes_is_refused() -> None:
    class Writing(nn.Linear):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            global SCALE
            SCALE = 1.0
            return super().forward(batch)

    with pytest.raises(memfit.CaptureError, match="writes a global"):
        memfit.fit(Writing(16, 4), torch.randn(8, 16), None, progress=False)


def test_classes_read_their_attributes_as_before() -> None:
    before = nn.Module.__getattribute__
    memfit.fit(Net(), torch.randn(8, 16), 0.9, progress=False)
    assert nn.Module.__getattribute__ is before
    assert "__getattribute__" not in vars(Settings)


def test_a_value_that_has_no_plan_is_named_with_what_it_was() -> None:
    model = Net()
    batch = torch.randn(32, 16)
    memfit.fit(model, batch, "smallest", time_limit=1, progress=False)
    model(batch).backward()
    model.activation = lambda values: torch.stack([values.exp() * values.sin()] * 9).square().exp().sum(0)
    with pytest.raises(memfit.InfeasibleBudget, match=r"of a new kind \(activation was"):
        model(batch)


def test_a_call_of_a_new_kind_says_what_differs() -> None:
    model = Net()
    memfit.fit(model, torch.randn(32, 16), "smallest", time_limit=1, progress=False)
    with pytest.raises(memfit.InfeasibleBudget, match=r"the shape of argument 0 was \[32, 16\] and is \[512, 16\]"):
        model(torch.randn(512, 16))


def test_what_differs_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    memfit.fit(model, torch.randn(32, 16), 0.95, time_limit=1, progress=False)
    with caplog.at_level("INFO", logger="memfit.execute.attach"):
        model(torch.randn(32, 16, requires_grad=True))
        model.drop.eval()
        model(torch.randn(32, 16, requires_grad=True))
    assert "new kind of call to Net: argument 0 now requires a gradient" in caplog.text
    assert "new kind of call to Net: Dropout is now in eval mode" in caplog.text


def test_what_changes_in_every_step_is_named_with_what_to_do() -> None:
    model = Net()
    batch = torch.randn(32, 16)
    memfit.fit(model, batch, 0.95, time_limit=1, progress=False)

    def run() -> None:
        for number in range(6):
            model.drop.p = 0.2 + number / 10
            model(batch).backward()

    with pytest.warns(UserWarning, match=r"captured 3 times more because drop.p changes .* in a buffer") as said:
        run()
    assert len(said) == 1


def test_many_lengths_are_told_of_buckets() -> None:
    model = Net()
    memfit.fit(model, torch.randn(32, 16), 0.95, time_limit=1, progress=False)

    def run() -> None:
        for rows in range(10, 20):
            model(torch.randn(rows, 16)).backward()

    with pytest.warns(UserWarning, match="the shape of argument 0 changes .* memfit.Buckets.of") as said:
        run()
    assert len(said) == 1
