"""Budgets that count the loss which the caller computes outside of the model."""

import copy
import dataclasses
import itertools
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from regional import Branching, Experts, rows
from regional import images as big_images
from torch import nn

import memfit
from memfit.errors import InfeasibleBudget, InvalidInput
from memfit.ir import LossMemory
from memfit.measure.peak import measure_peak
from memfit.plan.plan import Plan
from memfit.report.story import stories_of

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = 20_000


class LanguageModel(nn.Module):
    """Few layers below many words: what the loss takes is more than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        )
        self.head = nn.Linear(32, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embedding(words)))
        return logits


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 12, 12, 12, 12)
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
                for before, after in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(12, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(images).mean((2, 3)))
        return logits


class Detector(nn.Module):
    """Three heads on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.classes, self.boxes, self.objects = (nn.Conv2d(16, width, 1) for width in (24, 16, 4))

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.body(images)
        return {name: getattr(self, name)(features) for name in ("classes", "boxes", "objects")}


def words_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])


def class_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def detector_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    found = model(batch["images"])
    losses = (
        F.cross_entropy(found["classes"], batch["classes"]),
        F.smooth_l1_loss(found["boxes"], batch["boxes"]),
        F.binary_cross_entropy_with_logits(found["objects"], batch["objects"]),
    )
    return torch.stack(losses).sum()


def words() -> Any:
    text = torch.randint(WORDS, (4, 65))
    return text[:, :-1].clone(), text[:, 1:].clone()


def pictures() -> Any:
    return torch.randn(8, 3, 24, 24), torch.randint(10, (8,))


def scenes() -> Any:
    images = torch.randn(4, 3, 24, 24)
    return {
        "images": images,
        "classes": torch.randint(24, (4, 24, 24)),
        "boxes": torch.randn(4, 16, 24, 24),
        "objects": torch.rand(4, 4, 24, 24),
    }


@dataclasses.dataclass(frozen=True)
class Case:
    model: type[nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    share: float  # of the unplanned peak: a budget that needs a plan


CASES = {
    "language model": Case(LanguageModel, words, words_loss, 0.99),
    "classifier": Case(Classifier, pictures, class_loss, 0.7),
    "detector": Case(Detector, scenes, detector_loss, 0.9),
}


def measured_bytes(model: nn.Module, batch: Any, loss: Callable[..., Any], *, adamw: bool = True) -> int:
    """The peak of the second step of a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters()) if adamw else None

    def step() -> None:
        model.zero_grad()
        loss(model, batch).backward()
        if optimizer is not None:
            optimizer.step()

    step()
    model.zero_grad()
    return measure_peak(step, resident=[model, batch, *([] if optimizer is None else [optimizer])]).peak_bytes


@pytest.mark.parametrize("is_smallest", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_the_loop_is_the_predicted_one_and_within_the_budget(name, is_smallest):
    case = CASES[name]
    torch.manual_seed(0)
    model, batch = case.model(), case.batch()
    budget = "smallest" if is_smallest else case.share
    memfit.fit(model, batch, budget, loss=case.loss, optimizer="adamw", time_limit=1, remember=False)
    plan = memfit.plan_of(model)
    assert not plan.is_identity
    measured = measured_bytes(model, batch, case.loss)
    assert measured <= plan.budget_bytes
    assert plan.peak_bytes == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("name", CASES)
def test_the_unplanned_peak_is_that_of_the_eager_loop(name):
    case = CASES[name]
    torch.manual_seed(0)
    model, batch = case.model(), case.batch()
    plan = memfit.plan(model, batch, budget=1.0, loss=case.loss, optimizer="adamw")
    assert plan.unplanned_peak_bytes == pytest.approx(measured_bytes(model, batch, case.loss), rel=0.005)


def test_without_a_loss_the_loop_of_a_language_model_takes_more_than_was_predicted():
    torch.manual_seed(0)
    model, (text, targets) = LanguageModel(), words()
    memfit.fit(model, text, 1.0, optimizer="adamw", remember=False)
    plan = memfit.plan_of(model)
    assert measured_bytes(model, (text, targets), words_loss) > 1.1 * plan.peak_bytes
    assert "loss computed outside" in str(plan)


def test_the_fitted_model_computes_what_the_eager_one_does():
    torch.manual_seed(0)
    model, batch = Detector(), scenes()
    detector_loss(model, batch).backward()
    eager = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    memfit.fit(model, batch, 0.8, loss=detector_loss, time_limit=1, remember=False)
    detector_loss(model, batch).backward()
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(eager, model.parameters(), strict=True))


def test_what_a_loss_returns_beside_its_scalar_is_held_to_the_end_of_the_step():
    def with_logits(model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits.transpose(1, 2), batch[1]), logits

    torch.manual_seed(0)
    model, batch = LanguageModel(), words()
    alone = memfit.plan(model, batch, budget=1.0, loss=words_loss)
    held = memfit.plan(model, batch, budget=1.0, loss=with_logits)
    logits_bytes = 4 * 64 * WORDS * 4
    assert held.unplanned_peak_bytes - alone.unplanned_peak_bytes == pytest.approx(logits_bytes, rel=0.01)
    kept: list[Any] = []  # what a loop holds in a variable

    def loop(model, batch):
        kept[:] = with_logits(model, batch)
        return kept[0]

    def step():
        loop(model, batch).backward()
        model.zero_grad()
        kept.clear()

    step()
    assert measure_peak(step, resident=[model, batch]).peak_bytes == pytest.approx(held.unplanned_peak_bytes, rel=0.005)


def test_a_loss_that_does_not_fit_is_refused_without_being_run():
    torch.manual_seed(0)
    model, batch, budget_bytes = LanguageModel(), words(), 40 * 2**20

    def refuse():
        with pytest.raises(InfeasibleBudget) as refused:
            memfit.plan(model, batch, budget=budget_bytes, loss=words_loss, time_limit=0.5)
        assert refused.value.operation == "the loss"

    assert measure_peak(refuse, resident=[model, batch]).peak_bytes <= budget_bytes


def test_penalties_on_parameters_in_the_loss_are_counted():
    def penalized(model, batch):
        return class_loss(model, batch) + sum(each.square().sum() for each in model.parameters())

    torch.manual_seed(0)
    model, batch = Classifier(), pictures()
    memfit.fit(model, batch, 0.8, loss=penalized, time_limit=1, remember=False)
    plan = memfit.plan_of(model)
    measured = measured_bytes(model, batch, penalized, adamw=False)
    assert measured <= plan.budget_bytes
    assert plan.peak_bytes == pytest.approx(measured, rel=0.005)


def test_a_plan_with_a_loss_can_be_saved_applied_and_shown(tmp_path):
    torch.manual_seed(0)
    model, batch = Detector(), scenes()
    plan = memfit.plan(model, batch, budget=0.8, loss=detector_loss, time_limit=1)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert isinstance(loaded.step.loss, LossMemory)
    (story,) = stories_of(loaded)
    assert max(story.planned.totals(story.values)) == plan.peak_bytes
    memfit.apply(loaded, model, batch["images"])
    assert measured_bytes(model, batch, detector_loss, adamw=False) <= plan.budget_bytes


def test_a_plan_is_remembered_for_the_same_loss_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model, batch = Detector(), scenes()
    peaks = []
    for loss in (detector_loss, detector_loss, lambda model, batch: model(batch["images"])["classes"].square().mean()):
        memfit.fit(model, batch, 0.9, loss=loss, time_limit=1)
        peaks.append(memfit.plan_of(model).unplanned_peak_bytes)
        memfit.remove(model)
    assert peaks[0] == peaks[1] != peaks[2]


def test_calls_of_another_size_count_a_loss_of_that_size():
    torch.manual_seed(0)
    model, batch = Detector(), scenes()
    memfit.fit(model, batch, 1.0, loss=detector_loss, optimizer="adamw", remember=False)
    half = {name: value[:2] for name, value in batch.items()}
    half = {name: value.clone() for name, value in half.items()}
    assert measured_bytes(model, half, detector_loss) <= memfit.plan_of(model).budget_bytes
    known = LossMemory(working_bytes=100, lasting_bytes=10, batch_bytes=20, output_bytes=50)
    assert known.scaled(25) == LossMemory(working_bytes=50, lasting_bytes=5, batch_bytes=10, output_bytes=25)


def test_a_model_without_weights_is_planned_with_a_simulated_loss():
    torch.manual_seed(0)
    real = memfit.plan(LanguageModel(), batch := words(), budget=1.0, loss=words_loss)
    with memfit.without_weights():
        model = LanguageModel()
    plan = memfit.plan(model, batch, budget=1.0, loss=words_loss)
    assert plan.unplanned_peak_bytes == pytest.approx(real.unplanned_peak_bytes, rel=0.005)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: batch[0].mean(), "does not call"),
        (lambda model, batch: model(batch[0]).mean() + model(batch[0]).mean(), "2 times"),
        (lambda model, batch: model(batch[0]).square(), "one scalar"),
        (lambda model, batch: model(batch[0]).detach().mean() + model.head.bias.sum(), "no gradient"),
    ],
)
def test_a_function_that_is_no_loss_of_the_model_is_refused(loss, words):
    model, batch = Classifier(), pictures()
    with pytest.raises(InvalidInput, match=words):
        memfit.fit(model, batch, 0.8, loss=loss, remember=False)
    assert "forward" not in vars(model)


def test_a_model_in_regions_is_planned_with_its_loss():
    def scaled(model, batch):
        return model(batch[0]) * batch[1].mean()

    torch.manual_seed(0)
    model, batch = Branching(), (big_images(), torch.randn(1000, 50))
    memfit.fit(model, batch, 0.85, loss=scaled, time_limit=1)
    plan = memfit.plan_of(model)
    assert plan.regions
    measured = measured_bytes(model, batch, scaled, adamw=False)
    assert measured <= plan.budget_bytes
    assert plan.peak_bytes == pytest.approx(measured, rel=0.01)


def test_what_is_not_counted_is_said_in_one_line(caplog):
    model, (images, _) = Classifier(), pictures()
    with caplog.at_level(logging.INFO, logger="memfit.api"):
        plan = memfit.plan(model, images, budget=1.0)
    (line,) = [each.getMessage() for each in caplog.records if "not counted" in each.getMessage()]
    assert 'optimizer="adamw" would add' in line
    assert "loss=" in line
    assert line in str(plan)


def test_the_smallest_budget_is_said_to_be_for_this_sample_alone(caplog):
    with caplog.at_level(logging.INFO, logger="memfit.api"):
        memfit.fit(Classifier(), pictures()[0], "smallest", time_limit=0.1)
    assert "longer batches and other kinds of calls need more" in caplog.text


def test_nothing_is_said_where_everything_is_counted(caplog):
    model, batch = Classifier(), pictures()
    with caplog.at_level(logging.INFO, logger="memfit.api"):
        plan = memfit.plan(model, batch, budget=1.0, loss=class_loss, optimizer="adamw")
    assert "not counted" not in caplog.text + str(plan)


@pytest.mark.parametrize(("make", "batch"), [(Branching, big_images), (Experts, rows)])
def test_a_model_that_cannot_be_traced_is_estimated_by_a_step(make, batch):
    torch.manual_seed(0)
    model, sample = make(), batch()
    estimate = memfit.estimate(model, sample, optimizer="adamw")
    assert any("measured in a step" in note for note in estimate.notes)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sum(estimate.by_kind().values()) == estimate.peak_bytes
    assert estimate.peak_bytes == pytest.approx(
        measured_bytes(model, sample, lambda model, batch: model(batch)), rel=0.005
    )


def test_a_refused_budget_is_split_into_what_always_lives_and_what_comes_on_top():
    model, batch = Classifier(), pictures()
    with pytest.raises(InfeasibleBudget, match=r"parameters .*gradients") as refused:
        memfit.plan(model, batch, budget="200KiB", loss=class_loss, optimizer="adamw", time_limit=0.5)
    assert "on top of" in str(refused.value)
    assert "smaller batch" in str(refused.value)
    assert refused.value.floor_bytes <= refused.value.smallest_bytes


def test_no_smaller_batch_is_advised_where_parameters_alone_are_too_much():
    model, sample = nn.Linear(512, 512), torch.randn(2, 512)
    with pytest.raises(InfeasibleBudget, match="an optimizer that keeps less") as refused:
        memfit.plan(model, sample, budget="2MiB", optimizer="adamw", time_limit=0.5)
    assert "smaller batch" not in str(refused.value)
    with pytest.raises(InfeasibleBudget, match="train fewer parameters"):
        memfit.plan(model, sample, budget="1500KiB", time_limit=0.5)


@pytest.mark.parametrize("cached", [True, False])
def test_a_loss_that_switches_autocast_on_for_the_model_alone(cached: bool) -> None:
    def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            output = model(batch)
        return output.float().pow(2).mean()

    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    plain, batch = copy.deepcopy(model), torch.randn(512, 64)
    memfit.fit(model, batch, budget="smallest", loss=mean_square, remember=False, progress=False, time_limit=0.5)
    plan = memfit.plan_of(model)
    assert plan is not None
    peak = measure_peak(lambda: mean_square(model, batch).backward(), resident=[model, batch]).peak_bytes
    assert peak == pytest.approx(plan.peak_bytes, rel=0.001)
    assert memfit.captures_of(model).count == 1  # the loop's own call, not another one for autocast
    model.zero_grad()
    mean_square(model, batch).backward()
    mean_square(plain, batch).backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert torch.equal(own.grad, other.grad)


@pytest.mark.parametrize("verb", ["estimate", "plan", "fit"])
def test_a_loss_that_draws_before_it_calls_the_model_leaves_generators_as_they_were(verb: str) -> None:
    def denoising(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(batch) * random.random()
        loss: torch.Tensor = F.mse_loss(model(batch + noise), noise)
        return loss

    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    options = {} if verb == "estimate" else {"budget": "smallest"}
    before, python = torch.get_rng_state(), random.getstate()
    getattr(memfit, verb)(model, batch, loss=denoising, progress=False, **options)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python
