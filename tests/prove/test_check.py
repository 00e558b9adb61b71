"""`memfit.check` finds what differs, and says so; what it says of equal steps is true."""

import itertools
import json
import math

import pytest
import torch
from budgeted import ConvNet, Perceptron, assert_untouched, images, rows, state_of
from torch import nn

import memfit
from memfit.errors import InvalidFile, InvalidInput
from memfit.execute.compiled import CompiledCall
from memfit.prove import comparison

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def planned():
    torch.manual_seed(0)
    model, batch = ConvNet(), images(4)
    return model, memfit.plan(model, batch, budget=0.7), batch


def test_an_exact_plan_is_equal_bit_for_bit_in_every_part(planned):
    model, plan, batch = planned
    before = state_of(model)
    check = memfit.check(model, plan, batch)
    assert check.exact
    assert check.passed
    assert check.tolerance == 0
    compared = {each.part: each.compared for each in check.comparisons}
    assert compared == {
        "outputs": 1,
        "gradients": len(list(model.parameters())),
        "buffers": len(list(model.buffers())),
        "generator": 1,
    }
    assert "equal bit for bit" in str(check)
    assert_untouched(model, before)


def test_gradients_and_plans_that_were_there_come_back(planned):
    _, plan, batch = planned
    model = ConvNet()
    model.stem.weight.grad = torch.ones_like(model.stem.weight)
    memfit.apply(plan, model)
    memfit.check(model, plan, batch)
    assert torch.equal(model.stem.weight.grad, torch.ones_like(model.stem.weight))
    assert memfit.plan_of(model) == plan


def test_gradients_of_the_sample_are_compared_and_do_not_stay():
    model, batch = Perceptron(), rows(32).requires_grad_()
    plan = memfit.plan(model, batch, budget="1GiB")
    gradients = memfit.check(model, plan, batch).comparisons[1]
    assert gradients.compared == gradients.equal == len(list(model.parameters())) + 1
    assert batch.grad is None


def noisy(monkeypatch, amount):
    """Every planned call computes something else from now on."""
    run = CompiledCall.__call__
    monkeypatch.setattr(CompiledCall, "__call__", lambda *arguments: run(*arguments) * (1 + amount))


def test_a_planned_step_that_computes_something_else_is_found(planned, monkeypatch):
    noisy(monkeypatch, 1e-3)
    check = memfit.check(*planned)
    assert not check.exact
    assert not check.passed
    outputs, gradients, buffers, _ = check.comparisons
    assert outputs.equal == 0
    assert outputs.largest_difference == pytest.approx(1e-3, rel=0.1)
    assert gradients.equal < gradients.compared
    assert gradients.worst in dict(planned[0].named_parameters())
    assert buffers.equal == buffers.compared
    assert "DIFFERENT" in str(check)


def test_a_tolerance_is_what_it_is_judged_by(monkeypatch):
    model, batch = Perceptron(), rows(32)  # not the ConvNet: gradients that are nearly zero differ by much
    plan = memfit.plan(model, batch, budget="1GiB")
    noisy(monkeypatch, 1e-4)
    assert not memfit.check(model, plan, batch, tolerance=1e-5).passed
    lenient = memfit.check(model, plan, batch, tolerance=1e-2)
    assert lenient.passed
    assert not lenient.exact
    assert "within tolerance" in str(lenient)


def test_a_difference_below_the_rounding_of_the_largest_number_is_told_apart():
    eager = {"weight": torch.tensor([1.0, 2.0]), "bias": torch.tensor([1e-9])}
    rounded = {"weight": eager["weight"], "bias": torch.tensor([2e-9])}
    wrong = {"weight": eager["weight"], "bias": torch.tensor([1e-5])}
    noise, beyond = (comparison.compared_part("gradients", eager, planned) for planned in (rounded, wrong))
    assert noise.largest_difference == pytest.approx(1.0)
    assert noise.beyond_rounding == 0.0
    assert noise.worst == "bias"
    assert noise.equal == 1
    assert beyond.beyond_rounding == beyond.largest_difference > 1e3
    assert comparison.compared_part("gradients", eager, {"weight": eager["weight"]}).beyond_rounding == math.inf
    buffers = comparison.compared_part("buffers", eager, rounded)
    assert buffers.beyond_rounding == buffers.largest_difference
    masked = comparison.compared_part(
        "gradients", eager | {"mask": torch.tensor([-math.inf])}, rounded | {"mask": torch.tensor([-math.inf])}
    )
    assert masked.beyond_rounding == 0.0
    assert masked.equal == 2


def test_a_generator_that_went_another_way_is_found(planned, monkeypatch):
    run = CompiledCall.__call__

    def drawing(*arguments):
        torch.rand(1)
        return run(*arguments)

    monkeypatch.setattr(CompiledCall, "__call__", drawing)
    check = memfit.check(*planned)
    assert {each.part: each.equal == each.compared for each in check.comparisons}["generator"] is False


def test_buffers_that_are_not_updated_are_found(planned, monkeypatch):
    run = CompiledCall.__call__

    def forgetful(call, states, args, kwargs):
        before = [state.detach().clone() for state in states]
        result = run(call, states, args, kwargs)
        with torch.no_grad():
            for state, old in zip(states, before, strict=True):
                if not state.requires_grad:
                    state.copy_(old)
        return result

    monkeypatch.setattr(CompiledCall, "__call__", forgetful)
    check = memfit.check(*planned)
    assert {each.part for each in check.comparisons if each.equal < each.compared} == {"buffers"}


def test_lossy_plans_need_a_tolerance_to_be_judged_by():
    model, batch = Perceptron(), rows(128)
    plan = memfit.plan(model, batch, budget=0.8, allow=("recompute", "8-bit"), time_limit=0.5)
    with pytest.raises(InvalidInput, match=r"8-bit.*tolerance"):
        memfit.check(model, plan, batch)
    assert memfit.check(model, plan, batch, tolerance=0.2).passed


def test_sums_in_another_order_are_given_a_millionth(planned):
    model, batch = Perceptron(), rows(32)
    plan = memfit.plan(model, batch, budget="1GiB", allow=("recompute", "chunk"))
    assert memfit.check(model, plan, batch).tolerance == 1e-6


def test_a_plan_of_another_sample_is_refused(planned):
    model, plan, _ = planned
    with pytest.raises(InvalidFile):
        memfit.check(model, plan, images(3))
    assert "forward" not in model.__dict__


class ReturningNaN(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, features):
        return self.linear(features).sum().log()


def test_numbers_that_are_none_are_equal_to_themselves():
    model, batch = ReturningNaN(), -1e9 * torch.ones(2, 4)
    model.linear.weight.data.fill_(1.0)
    plan = memfit.plan(model, batch, budget="1GiB")
    assert memfit.check(model, plan, batch).exact


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), None),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), None),
        (torch.tensor(float("nan")), torch.tensor(1.0), float("inf")),
        (torch.tensor([4.0, 2.0]), torch.tensor([4.0, 1.0]), 0.25),
        (torch.zeros(2), torch.tensor([0.0, 3.0]), 3.0),
        (torch.zeros(2), torch.zeros(3), float("inf")),
        (torch.zeros(2), None, float("inf")),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), float("inf")),
        (torch.zeros(0), torch.zeros(0), None),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), None),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
    ],
)
def test_differences(one, other, difference):
    assert comparison.difference(one, other) == difference


def test_a_check_is_written_as_json(planned):
    written = json.loads(memfit.check(*planned).to_json())
    assert written["passed"] is True
    assert written["how"]
    assert written["exact"] is True
    assert len(written["comparisons"]) == 4


_CALLS = itertools.count()


@torch.library.custom_op("memfit_tests::by_chance", mutates_args=())
def by_chance(values: torch.Tensor) -> torch.Tensor:
    """As atomic additions: the same but for rounding, which no two calls have alike."""
    return values * (1 + 1e-6 * next(_CALLS))


by_chance.register_fake(torch.empty_like)
by_chance.register_autograd(lambda _context, gradient: by_chance(gradient))


class PartlyByChance(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows):
        return self.first(rows).square().sum() + by_chance(self.last(rows.cos())).sum()


def test_what_two_eager_steps_make_differently_says_nothing_of_a_plan():
    model, rows = PartlyByChance(), torch.randn(8, 4)
    found = memfit.check(model, memfit.plan(model, rows), rows)
    assert found.exact
    assert "left out is what two eager steps make differently" in found.how
    assert "last.weight" in found.how
    assert {each.part: each.compared for each in found.comparisons}["gradients"] == 2  # those of the first layer
