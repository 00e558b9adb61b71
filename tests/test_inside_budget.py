"""From a call to its return, planning never allocates more than the budget."""

import copy
import itertools

import pytest
import torch
from torch import nn

import memfit
from memfit.measure.peak import measure_peak
from memfit.plan.solve import _Search


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 16, 16, 16, 16]
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(images).mean((2, 3))).square().mean()


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(64, 500)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(self.embedding(words)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 64)
        self.layers = nn.LSTM(64, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 300)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(self.embedding(words))[0])
        return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


MODELS = {
    "convolutional": (ConvNet, lambda: torch.randn(16, 3, 32, 32)),
    "transformer": (Transformer, lambda: torch.randint(500, (8, 32))),
    "recurrent": (Recurrent, lambda: torch.randint(300, (8, 32))),
}


@pytest.fixture
def _fresh_costs(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("one_thread", "_fresh_costs")
@pytest.mark.parametrize("share", [0.8, 0.2])
@pytest.mark.parametrize("name", MODELS)
def test_fit_stays_inside_the_budget_and_so_does_the_step(name, share, tmp_path, monkeypatch) -> None:
    make_model, make_batch = MODELS[name]
    model, batch = make_model().train(), make_batch()
    budget = budget_at(model, batch, share)
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "another"))  # all is measured again
    seen = measure_peak(lambda: memfit.fit(model, batch, budget, time_limit=2), resident=[model, batch])
    assert seen.resident_bytes < seen.peak_bytes <= budget
    plan = memfit.plan_of(model)
    assert plan is not None
    assert plan.times_measured
    model(batch).backward()
    model.zero_grad()
    step = measure_peak(lambda: model(batch).backward(), resident=[model, batch])
    assert step.peak_bytes <= budget


def budget_at(model, batch, share):
    """A budget between the smallest there is (0) and the unplanned peak (1)."""
    smallest = memfit.plan(copy.deepcopy(model), batch, budget="smallest", time_limit=2)
    room_bytes = smallest.unplanned_peak_bytes - smallest.budget_bytes
    return smallest.budget_bytes + int(share * room_bytes)


@pytest.mark.usefixtures("one_thread", "_fresh_costs")
@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_plan_is_found_without_running_the_unplanned_step(name) -> None:
    make_model, make_batch = MODELS[name]
    model, batch = make_model().train(), make_batch()
    plans = []
    seen = measure_peak(
        lambda: plans.append(memfit.plan(model, batch, budget="smallest", time_limit=2)), resident=[model, batch]
    )
    assert seen.resident_bytes < seen.peak_bytes < 0.9 * plans[0].unplanned_peak_bytes


@pytest.mark.usefixtures("one_thread", "_fresh_costs")
def test_a_frontier_stays_inside_its_largest_budget() -> None:
    model, batch = ConvNet(), torch.randn(16, 3, 32, 32)
    curves = []
    seen = measure_peak(
        lambda: curves.append(memfit.frontier(model, batch, fractions=(0.6, 0.4), time_limit=4)),
        resident=[model, batch],
    )
    assert seen.peak_bytes <= max(plan.budget_bytes for plan in curves[0].plans)


@pytest.mark.usefixtures("one_thread", "_fresh_costs")
def test_a_step_is_chosen_inside_its_budget() -> None:
    model, batch = ConvNet(), torch.randn(16, 3, 32, 32)
    budget = budget_at(model, batch, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = memfit.Step(model, optimizer, lambda model, batch: model(batch), budget=budget)
    seen = measure_peak(lambda: step(batch), resident=[model, batch])
    assert seen.peak_bytes <= budget


@pytest.mark.usefixtures("one_thread", "_fresh_costs")
def test_the_largest_batch_is_found_inside_the_budget() -> None:
    model, batch = ConvNet(), torch.randn(4, 3, 32, 32)
    budget = 4 * 2**20
    seen = measure_peak(
        lambda: memfit.max_batch(model, batch, budget, allow=("recompute", "lean")), resident=[model, batch]
    )
    assert seen.peak_bytes <= budget


@pytest.mark.usefixtures("one_thread", "_fresh_costs")
def test_a_profile_stays_inside_the_budget_unless_eager_steps_are_asked_for() -> None:
    model, batch = ConvNet(), torch.randn(16, 3, 32, 32)
    plan = memfit.plan(model, batch, budget=budget_at(model, batch, 0.5), time_limit=2)
    found = []
    seen = measure_peak(lambda: found.append(memfit.profile(model, plan, batch, pairs=1)), resident=[model, batch])
    assert seen.peak_bytes <= plan.budget_bytes
    assert found[0].eager_peak_bytes is None
    assert found[0].slowdown is None
    assert memfit.profile(model, plan, batch, pairs=1, eager=True).eager_peak_bytes > plan.budget_bytes


@pytest.mark.usefixtures("one_thread", "_fresh_costs")
def test_nothing_is_measured_or_searched_where_the_step_fits(monkeypatch) -> None:
    monkeypatch.setattr("memfit.execute.timed_step.TimedStep.run", lambda *_, **__: pytest.fail("a step was run"))
    monkeypatch.setattr(_Search, "run", lambda *_: pytest.fail("searched"))
    model, batch = ConvNet(), torch.randn(4, 3, 32, 32)
    memfit.fit(model, batch, "1GiB")
    assert memfit.plan_of(model).is_identity


@pytest.mark.usefixtures("one_thread", "_fresh_costs")
def test_gradients_of_an_earlier_step_are_kept_and_count() -> None:
    model, batch = ConvNet(), torch.randn(16, 3, 32, 32)
    budget = budget_at(model, batch, 0.5)
    model(batch).backward()
    gradients = [each.grad for each in model.parameters()]
    seen = measure_peak(lambda: memfit.fit(model, batch, budget, time_limit=2), resident=[model, batch, gradients])
    assert seen.peak_bytes <= budget
    assert all(each.grad is kept for each, kept in zip(model.parameters(), gradients, strict=True))


STANDARD = ("ResNet-50", "GoogLeNet", "MobileNetV2", "VGG-16", "ViT-B/16", "UNet", "GPT-2", "BERT", "LSTM")


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_costs")
@pytest.mark.parametrize("name", STANDARD)
def test_standard_models_are_fitted_inside_the_budget(name, tmp_path, monkeypatch) -> None:
    from benchmarks.models import frontier_cases

    case = next(each for each in frontier_cases() if each.name == name)
    model, batch = case.make_model().train(), case.make_batch(case.batch_size)
    options = {} if case.outputs is None else {"outputs": case.outputs}
    smallest = memfit.plan(model, case.sample(batch), budget="smallest", **options)
    budget = (smallest.budget_bytes + smallest.unplanned_peak_bytes) // 2
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "another"))
    seen = measure_peak(lambda: memfit.fit(model, case.sample(batch), budget, **options), resident=[model, batch])
    assert seen.peak_bytes <= budget
    case.loss(model, batch).backward()
    model.zero_grad()
    step = measure_peak(lambda: case.loss(model, batch).backward(), resident=[model, batch])
    assert step.peak_bytes <= budget
