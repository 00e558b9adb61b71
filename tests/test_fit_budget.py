"""Models that train inside a budget: the same numbers as eager, and no more memory than was given."""

import copy
import io

import pytest
import torch
from budgeted import (
    BLOCKS,
    Answer,
    Answering,
    ConvNet,
    Perceptron,
    assert_same,
    assert_untouched,
    images,
    rows,
    state_of,
    step,
)
from torch import nn

import memfit
from memfit.errors import ExecutionError, InfeasibleBudget, InvalidInput
from memfit.measure.peak import measure_peak
from memfit.plan.plan import Treatment

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def fitted():
    """An eager model, a twin that trains inside 70% of its peak, and a batch."""
    torch.manual_seed(0)
    eager, batch = ConvNet(), images()
    return eager, memfit.fit(copy.deepcopy(eager), batch, budget=0.7), batch


@pytest.fixture
def pair(fitted):
    """The same, with nothing accumulated and equal buffers."""
    eager, planned, batch = fitted
    planned.load_state_dict(eager.state_dict())
    for model in (eager, planned):
        model.train().zero_grad()
    return eager, planned, batch


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def measured_bytes(model, batch):
    def run():
        step(model, batch)

    run()
    model.zero_grad()
    return measure_peak(run, resident=[model, batch]).peak_bytes


# The same numbers


def test_steps_are_equal_bit_for_bit(pair):
    eager, planned, batch = pair
    assert not memfit.plan_of(planned).is_identity
    for seed in range(3):
        assert_same(step(eager, batch, seed), step(planned, batch, seed))


@pytest.mark.parametrize(("make_model", "make_batch"), [(ConvNet, lambda: images(2)), (Perceptron, lambda: rows(64))])
def test_training_ends_in_the_same_parameters(make_model, make_batch):
    eager, batches = make_model(), [make_batch() for _ in range(3)]
    planned = memfit.fit(copy.deepcopy(eager), batches[0], budget="smallest", time_limit=1.0)
    assert not memfit.plan_of(planned).is_identity
    for model in (eager, planned):
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(50):
            optimizer.zero_grad()
            model(batches[number % 3]).square().mean().backward()
            optimizer.step()
    assert_same(state_of(eager), state_of(planned))


@pytest.mark.parametrize("allow", [("recompute",), ("lean",), ("recompute", "lean")])
def test_exact_techniques_change_no_bit(allow):
    eager, batch = Perceptron(), rows()
    planned = memfit.fit(copy.deepcopy(eager), batch, budget=0.75, allow=allow)
    assert not memfit.plan_of(planned).is_identity
    assert_same(step(eager, batch), step(planned, batch))


def test_gradients_accumulate_over_calls(pair):
    ends = []
    for model in pair[:2]:
        torch.manual_seed(1)
        for factor in (1, 2):
            (model(pair[2] * factor).square().mean() / 2).backward()
        ends.append([*gradients(model), *model.buffers(), torch.get_rng_state()])
    assert_same(*ends)


def test_a_retained_graph_can_be_differentiated_again(pair):
    ends = []
    for model in pair[:2]:
        torch.manual_seed(1)
        loss = model(pair[2]).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        ends.append([*gradients(model), torch.get_rng_state()])
    assert_same(*ends)


def test_evaluation_runs_the_own_forward(pair):
    eager, planned, batch = pair
    assert torch.equal(planned.eval()(batch), eager.eval()(batch))
    with torch.no_grad():
        planned.train()(batch)
    assert len(planned.forward.calls) == 1


# No more memory than was given


@pytest.mark.parametrize("budget", [0.9, 0.6, "smallest"])
def test_the_measured_peak_is_within_the_budget_and_as_predicted(budget):
    model, batch = ConvNet(), images()
    memfit.fit(model, batch, budget=budget)
    plan = memfit.plan_of(model)
    peak_bytes = measured_bytes(model, batch)
    assert peak_bytes <= plan.budget_bytes * 1.01
    assert peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)


def test_the_optimizers_step_is_within_the_budget():
    model, batch = ConvNet(), images()
    memfit.fit(model, batch, budget=0.7, optimizer="adamw")
    optimizer = torch.optim.AdamW(model.parameters())

    def run():
        step(model, batch)
        optimizer.step()
        optimizer.zero_grad()

    run()
    peak_bytes = measure_peak(run, resident=[model, batch, optimizer.state_dict()]).peak_bytes
    assert peak_bytes <= memfit.plan_of(model).budget_bytes * 1.01


@pytest.mark.parametrize("count", [4, 10])
def test_a_batch_of_another_size_is_planned_under_the_same_budget(pair, count):
    eager, planned, _ = pair
    batch = images(count)
    assert_same(step(eager, batch), step(planned, batch))
    assert measured_bytes(planned, batch) <= memfit.plan_of(planned).budget_bytes * 1.01


def test_a_batch_that_cannot_fit_the_budget_is_refused_and_the_model_goes_on(pair):
    eager, planned, batch = pair
    with pytest.raises(InfeasibleBudget) as refused:
        planned(images(40))
    assert refused.value.smallest_bytes > memfit.plan_of(planned).budget_bytes
    assert_same(step(eager, batch), step(planned, batch))


def test_an_applied_plan_holds_its_budget_for_other_sizes_with_the_optimizer():
    model = ConvNet()
    plan = memfit.plan(model, images(), budget=0.7, optimizer="sgd")
    memfit.apply(plan, model)
    state_bytes = plan.optimizer_state_bytes
    assert state_bytes > 0
    assert measured_bytes(model, images(9)) + state_bytes <= plan.budget_bytes * 1.01


def test_recompute_without_a_budget_is_layer_wise_checkpointing(pair):
    eager, _, batch = pair
    planned = memfit.fit(copy.deepcopy(eager), batch, recompute=[1])
    plan = memfit.plan_of(planned)
    assert plan.budget_bytes is None
    assert {fate.module for fate in plan.fates if fate.treatment is Treatment.AGAIN} == {
        f"layers.{number}.0" for number in range(BLOCKS)
    }
    assert_same(step(eager, batch), step(planned, batch))
    assert measured_bytes(planned, batch) == pytest.approx(plan.peak_bytes, rel=0.01)


# Still the same module


def test_copies_and_saved_states_work(pair):
    eager, planned, batch = pair
    twin = copy.deepcopy(planned)
    buffer = io.BytesIO()
    torch.save(planned.state_dict(), buffer)
    buffer.seek(0)
    eager.load_state_dict(torch.load(buffer))
    assert list(planned.state_dict()) == list(eager.state_dict())
    assert_same(step(eager, batch), step(twin, batch))
    assert all(gradient is None for gradient in gradients(planned))
    assert memfit.plan_of(twin) == memfit.plan_of(planned)


def test_remove_gives_the_model_back():
    eager, batch = Perceptron(), rows(64)
    planned = memfit.fit(copy.deepcopy(eager), batch, budget=0.9)
    with pytest.raises(InvalidInput, match="already"):
        memfit.fit(planned, batch, budget=0.9)
    assert memfit.remove(planned) is planned
    assert "forward" not in planned.__dict__
    assert memfit.plan_of(planned) is None
    assert_same(step(eager, batch), step(planned, batch))


class Failing(ConvNet):
    """Looks up rows that may not exist."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 3)

    def forward(self, images, row):
        return super().forward(images + self.table(row)[:, :, None, None])


def test_an_error_inside_a_planned_forward_leaves_the_model_usable():
    eager, batch = Failing(), images(2)
    planned = memfit.fit(copy.deepcopy(eager), (batch, torch.tensor([1, 2])), budget=0.8)
    with pytest.raises(IndexError):
        planned(batch, torch.tensor([1, 99]))
    ends = []
    for model in (eager, planned):
        torch.manual_seed(2)
        model(batch, torch.tensor([1, 2])).sum().backward()
        ends.append(gradients(model))
    assert_same(*ends)


def test_a_fit_that_fails_leaves_the_model_alone(pair):
    model = copy.deepcopy(pair[0])
    before = state_of(model)
    with pytest.raises(InfeasibleBudget):
        memfit.fit(model, pair[2], budget=0.1)
    assert_untouched(model, before)


# Outputs beside the loss


def test_only_the_loss_is_kept_where_that_is_asked_for():
    eager, batch = Answering(), torch.randn(256, 64)
    planned = memfit.fit(copy.deepcopy(eager), batch, budget=0.9, outputs="loss")
    assert memfit.plan_of(planned).outputs == "loss"
    answers = [model(batch) for model in (eager, planned)]
    assert isinstance(answers[1], Answer)
    assert answers[1].logits is None
    assert torch.equal(answers[0].loss, answers[1].loss)
    for answer in answers:
        answer.loss.backward()
    assert_same(gradients(eager), gradients(planned))
    whole = memfit.plan(eager, batch, budget="1GiB")
    alone = memfit.plan(eager, batch, budget="1GiB", outputs="loss")
    assert alone.persistent_bytes < whole.persistent_bytes


def test_a_gradient_from_an_output_beside_the_loss_is_refused():
    planned = memfit.fit(Answering(), torch.randn(16, 64), budget="1GiB")
    with pytest.raises(ExecutionError, match="beside the loss"):
        planned(torch.randn(16, 64)).logits.sum().backward()


def test_a_part_that_has_two_names_can_be_planned():
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
    eager = nn.Sequential(conv, norm, nn.ReLU(), conv, norm, nn.Sigmoid(), conv)
    batch = torch.randn(4, 8, 16, 16)
    planned = memfit.fit(copy.deepcopy(eager), batch, budget="smallest")
    assert_same(step(eager, batch), step(planned, batch))


class AddsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, features):
        hidden = self.linear(features)
        return hidden.index_add(0, torch.arange(len(features)).flip(0), hidden).square()


def test_what_is_read_twice_is_not_overwritten():
    eager, batch = AddsItself(), torch.randn(64, 64)
    planned = memfit.fit(copy.deepcopy(eager), batch, budget="smallest")
    assert_same(step(eager, batch), step(planned, batch))


class Centred(nn.Module):
    """Whose gradient from ones is zero everywhere."""

    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, padding=1))

    def forward(self, images):
        features = self.convs(images)
        return features - features.mean((1, 2, 3), keepdim=True)


def test_operators_are_compared_on_gradients_that_do_not_cancel():
    torch.manual_seed(0)
    eager, batch = Centred(), torch.randn(4, 8, 32, 32)
    planned = memfit.fit(copy.deepcopy(eager), batch, budget="smallest")
    assert_same(step(eager, batch), step(planned, batch))


class TinyDepthwise(nn.Module):
    """Convolutions whose library takes several times what they read and make, as scratch of a fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Conv1d(4, 4, 3, padding=1, groups=4, bias=False)
        self.point = nn.Conv1d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.point(nn.functional.silu(self.deep(x))).square().mean()


def test_fixed_scratch_of_tiny_convolutions_is_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))  # nothing is known of them
    batch = torch.randn(1, 4, 6)
    model = memfit.fit(TinyDepthwise(), batch, "smallest", time_limit=0.2, remember=False)
    assert measured_bytes(model, batch) <= memfit.plan_of(model).budget_bytes * 1.01 + 4096
