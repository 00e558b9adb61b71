"""One budget for the whole step: what is chosen fits, is the fastest that does, and gives the plain loop's numbers."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import assert_same_parameters, assert_same_state, train_plainly, twins

import memfit
from memfit.errors import ExecutionError, InfeasibleBudget, InvalidBudget, InvalidInput
from memfit.measure.peak import measure_peak
from memfit.prepare import prepare
from memfit.step import choose as choose_module
from memfit.step import piece as piece_module
from memfit.step.batches import split_batch
from memfit.step.update_cost import update_cost
from memfit.step.wishes import Wishes

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGETS = [1.0, 0.7, 0.45]


class Deep(nn.Module):
    """More bytes in activations than in parameters; the loss is outside."""

    def __init__(self, width=64, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 10)

    def forward(self, features):
        for layer in self.layers:
            features = features + F.gelu(layer(features))
        return self.last(features)


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def deep_rows(count=2048, width=64):
    return torch.randn(count, width), torch.randint(10, (count,))


def wide():
    """More bytes in parameters than in activations."""
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)), nn.Linear(256, 10))


CASES = {"deep": (Deep, deep_rows), "wide": (wide, lambda: deep_rows(64, 256))}


@pytest.fixture
def fixed_times(monkeypatch):
    """Times that are the same in every run: of operators by the roofline, of updates by the element."""

    known = {}

    def cost(optimizer, policy, room_bytes=None):
        key = policy.is_updated_in_parts, policy.state_tier
        if key not in known:
            slower = 1 + policy.is_updated_in_parts + 3 * (policy.state_tier is not None)
            known[key] = dataclasses.replace(update_cost(optimizer, policy), time_us=100.0 * slower)
        return known[key]

    monkeypatch.setattr(piece_module, "prepare", functools.partial(prepare, timed=False))
    monkeypatch.setattr(choose_module, "update_cost", cost)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def chosen(model, batch, budget, **options):
    step = memfit.Step(model, adamw(model), classify, budget=budget, sample=batch, time_limit=0.5, **options)
    assert step.choice is not None
    return step


def measured_peak(step, batch):
    step(batch)
    resident = [step.model, batch, *([] if step.policy.state_tier else [step.optimizer])]
    return measure_peak(lambda: step(batch), resident=resident).peak_bytes


@pytest.fixture
def captured_once(monkeypatch):
    """Pieces of one size are captured once, for all choices of a test."""
    pieces, capture = {}, piece_module.Piece.captured

    def captured(subject, piece, *others):
        key = len(piece[0])
        pieces[key] = pieces.get(key) or capture(subject, piece, *others)
        return pieces[key]

    monkeypatch.setattr(piece_module.Piece, "captured", captured)


def choice_of(model, batch, budget, directory, **fixed):
    wishes = Wishes(budget=budget, fixed=fixed, allow=(), directory=directory, time_limit_s=0.5)
    return choose_module.choose(model, adamw(model), classify, batch, wishes, split=split_batch)[0]


@pytest.mark.parametrize("name", CASES)
def test_the_choice_is_no_slower_than_any_single_technique(name, fixed_times, captured_once, tmp_path):
    make, rows = CASES[name]
    model, batch = make(), rows()
    plain_bytes = choice_of(model, batch, 1.0, None).budget_bytes
    alone = {"micro_batches": 1, "update": "after", "state_tier": None}
    singles = [alone, alone | {"update": "inside"}, alone | {"state_tier": "disk"}]
    singles.append(alone | {"micro_batches": 2})
    compared = 0
    for budget in (0.88, 0.6):
        choice = choice_of(model, batch, int(budget * plain_bytes), tmp_path)
        assert choice.peak_bytes <= choice.budget_bytes
        for single in singles:
            try:
                other = choice_of(model, batch, int(budget * plain_bytes), tmp_path, **single)
            except InfeasibleBudget:
                continue
            assert choice.sample_us <= 1.01 * other.sample_us
            compared += 1
    assert compared > 2


@pytest.mark.parametrize("name", CASES)
def test_what_is_chosen_runs_within_the_budget(name, fixed_times, tmp_path):
    make, rows = CASES[name]
    batch, several = rows(), set()
    plain_bytes = chosen(make(), batch, 1.0).choice.budget_bytes
    for budget in BUDGETS:
        step = chosen(make(), batch, int(budget * plain_bytes), directory=tmp_path)
        several.add((step.policy, step.choice.plan is None))
        peak_bytes = measured_peak(step, batch)
        assert peak_bytes <= step.choice.budget_bytes
        assert step.choice.peak_bytes == pytest.approx(peak_bytes, rel=0.02)
    assert len(several) > 1


@pytest.mark.parametrize("update", ["after", "inside"])
def test_state_on_disk_is_predicted(update, fixed_times, tmp_path):
    model, batch = wide(), deep_rows(64, 256)
    step = chosen(model, batch, 1.0, update=update, state_tier="disk", micro_batches=1, directory=tmp_path)
    peak_bytes = measured_peak(step, batch)
    assert peak_bytes <= 1.001 * step.choice.peak_bytes
    assert step.choice.peak_bytes == pytest.approx(peak_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("count", "update", "budget"),
    [(1, "after", 0.7), (1, "inside", 1.0), (1, "inside", 0.7), (2, "after", 1.0), (2, "inside", 0.7)],
)
def test_predicted_peaks_are_those_of_the_run(count, update, budget, fixed_times):
    batch = deep_rows()
    step = chosen(Deep(), batch, budget, micro_batches=count, update=update)
    assert (step.choice.plan is not None) == (budget < 1)
    assert step.choice.peak_bytes == pytest.approx(measured_peak(step, batch), rel=0.02)


@pytest.mark.parametrize("budget", [1.0, 0.6, 0.4])
def test_five_steps_are_those_of_the_plain_loop(budget):
    plain, model = twins(Deep())
    batches = [deep_rows(512) for _ in range(5)]
    step = memfit.Step(model, adamw(model), classify, budget=budget, time_limit=2.0)
    losses = [step(batch) for batch in batches]
    expected = adamw(plain)
    pieces = step.policy.micro_batches
    plain_losses = train_plainly(plain, expected, classify, batches, pieces=pieces)
    assert pieces > 1 or all(torch.equal(one, other) for one, other in zip(losses, plain_losses, strict=True))
    assert_same_parameters(model, plain)
    assert_same_state(step.optimizer, expected)


def test_times_are_measured_below_what_parameters_and_gradients_take(tmp_path):
    model, batch = wide(), deep_rows(16, 256)
    parameter_bytes = sum(each.nbytes for each in model.parameters())
    step = chosen(model, batch, int(1.9 * parameter_bytes), directory=tmp_path)
    assert step.choice.times_measured
    assert step.policy.update == "inside"
    assert measured_peak(step, batch) <= step.choice.budget_bytes


def test_choosing_changes_nothing():
    model, batch = Deep(), deep_rows(256)
    optimizer = adamw(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    step = memfit.Step(model, optimizer, classify, budget=0.7, time_limit=1.0)
    step.choose(batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_explain_names_everything(fixed_times):
    text = chosen(Deep(), deep_rows(), 0.6).choice.explain()
    for word in ("plain", "planned", "micro-batches", "update inside backward", "disk tier", "bf16", "fp16"):
        assert word in text
    for word in ("over the budget by", "not exact and not allowed", "low-bit", "offload", "predicted peak"):
        assert word in text


def test_a_choice_says_what_was_slower_and_what_was_chosen(fixed_times):
    choice = chosen(Deep(), deep_rows(), 1.0).choice
    assert [each.is_chosen for each in choice.alternatives].count(True) == 1
    assert choice.plan is None
    assert choice.policy.micro_batches == 1
    assert any("slower by" in each.verdict for each in choice.alternatives)
    assert choice.to_dict()["peak_bytes"] == choice.peak_bytes


def test_batch_norm_is_not_cut_unless_allowed(fixed_times):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    choice = chosen(model, deep_rows(512), 1.0).choice
    assert "statistics over the batch" in choice.explain()
    assert choice.policy.micro_batches == 1


def test_precision_is_chosen_where_it_is_allowed(fixed_times):
    batch = deep_rows(512)
    step = chosen(Deep(), batch, 2**30, allow=("bf16",))
    assert "not exact and not allowed; allow=('fp16',)" in step.choice.explain()
    assert any(each.techniques == "bf16" for each in step.choice.alternatives)
    assert torch.isfinite(step(batch))


def test_an_infeasible_budget_says_what_can_be_met(fixed_times):
    batch = deep_rows()
    with pytest.raises(InfeasibleBudget, match=r"directory=.*'offload'") as raised:
        chosen(Deep(), batch, "200KiB")
    step = chosen(Deep(), batch, raised.value.smallest_bytes)
    assert measured_peak(step, batch) <= 1.001 * raised.value.smallest_bytes


def test_a_mean_over_tokens_and_a_dataclass_batch(fixed_times):
    @dataclasses.dataclass
    class Batch:
        features: torch.Tensor
        labels: torch.Tensor

    def loss(model, batch):
        total = F.cross_entropy(model(batch.features), batch.labels, ignore_index=-100, reduction="sum")
        return memfit.Mean(total, (batch.labels != -100).sum())

    plain, model = twins(Deep())
    features, labels = deep_rows(512)
    labels[::3] = -100
    step = memfit.Step(
        model, adamw(model), loss, budget=0.7, sample=Batch(features, labels), micro_batches=1, time_limit=1.0
    )
    assert step.choice.plan is not None
    value = step(Batch(features, labels))
    optimizer = adamw(plain)
    expected = loss(plain, Batch(features, labels))
    (expected.sum / expected.count).backward()
    optimizer.step()
    torch.testing.assert_close(value, (expected.sum / expected.count).detach())
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_number_that_the_loss_reads_may_not_change_unseen(fixed_times):
    weight = 1.0

    def loss(model, batch):
        return weight * classify(model, batch)

    model, batch = Deep(), deep_rows(512)
    step = memfit.Step(model, adamw(model), loss, budget=0.7, sample=batch, micro_batches=1, time_limit=1.0)
    assert step.choice.plan is not None
    step(batch)
    weight = 0.5
    with pytest.raises(ExecutionError, match=r"'weight', which was 1\.0"):
        step(batch)


def test_bad_input_is_refused():
    model, batch = Deep(), deep_rows(8)
    with pytest.raises(InvalidBudget, match="smallest"):
        memfit.Step(model, adamw(model), classify, budget="smallest")
    with pytest.raises(InvalidInput, match="'magic' is not known"):
        memfit.Step(model, adamw(model), classify, budget="1GiB", allow=("magic",))
    with pytest.raises(InvalidInput, match="without a budget"):
        memfit.Step(model, adamw(model), classify).choose(batch)
    with pytest.raises(InvalidInput, match="give what is fixed as keywords"):
        memfit.Step(model, adamw(model), classify, budget="1GiB", policy=memfit.StepPolicy())
    with pytest.raises(InvalidInput, match="the model does not have"):
        memfit.Step(model, adamw(Deep()), classify, budget="1GiB")(batch)


def test_a_choice_is_used_again_by_another_step(fixed_times):
    batch = deep_rows()
    first = chosen(Deep(), batch, 0.6)
    torch.manual_seed(1)
    model = Deep()
    plain, same = twins(model)
    second = memfit.Step(same, adamw(same), classify, choice=first.choice)
    assert second.policy == first.policy
    assert measured_peak(second, batch) <= first.choice.budget_bytes
    optimizer = adamw(plain)
    for _ in range(2):
        optimizer.zero_grad()
        classify(plain, batch).backward()
        optimizer.step()
    if second.policy.micro_batches == 1:
        assert_same_parameters(plain, same)
    with pytest.raises(InvalidInput, match="give it alone"):
        memfit.Step(model, adamw(model), classify, choice=first.choice, budget=0.5)
    with pytest.raises(InvalidInput, match="micro_batches"):
        memfit.Step(model, adamw(model), classify, choice=first.choice, micro_batches=2)
