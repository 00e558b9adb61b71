"""Budgets of models in regions: what is promised, what is refused."""

import copy
import dataclasses

import pytest
import torch
from budgeted import assert_untouched, state_of
from regional import CASES, Branching, Nothing, Repeated, images
from torch import nn

import memfit
from memfit.capture.sample import Sample
from memfit.errors import CaptureError, InfeasibleBudget
from memfit.measure.peak import measure_peak
from memfit.plan.plan import Treatment
from memfit.recipe import Recipe
from memfit.regions.planner import RegionPlanner, make_region_planner, plan_by_regions

pytestmark = pytest.mark.usefixtures("one_thread")
ERROR = CaptureError("it asks")
BUDGETS = {"branching": 0.7, "experts": 0.6, "recurrent": 0.9, "repeated": 0.7}


@pytest.fixture(scope="module", params=BUDGETS)
def planned(request, one_thread):
    make, batch = (CASES | {"repeated": (Repeated, images)})[request.param]
    torch.manual_seed(0)
    model, sample = make(), batch()
    before = state_of(model)
    plan = memfit.plan(model, sample, budget=BUDGETS[request.param], time_limit=1)
    assert_untouched(model, before)
    return model, sample, plan


def test_the_peak_is_under_the_budget_and_as_predicted(planned):
    model, sample, plan = planned
    profile = memfit.profile(model, plan, sample, pairs=1, eager=True)
    assert plan.peak_bytes <= plan.budget_bytes
    assert profile.peak_bytes <= plan.budget_bytes * 1.01
    assert profile.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)
    assert profile.eager_peak_bytes == pytest.approx(plan.unplanned_peak_bytes, rel=0.001)


def test_planned_and_eager_are_equal_bit_for_bit(planned):
    model, sample, plan = planned
    assert memfit.check(model, plan, sample).exact


def test_a_plan_says_what_it_is_about(planned):
    model, _, plan = planned
    text = str(plan)
    assert "planned by regions: " in text
    assert f"left eager: the model itself, because {type(model).__name__} could not be captured" in text
    assert set(plan.regions) <= {name for name, _ in model.named_modules()}
    assert any(fate.treatment is not Treatment.KEPT for fate in plan.fates)
    assert all(any(fate.module.startswith(name) for name in plan.regions) for fate in plan.fates)


def test_planning_stays_inside_the_budget(planned):
    model, sample, plan = planned
    model = copy.deepcopy(model)
    seen = measure_peak(lambda: memfit.fit(model, sample, plan.budget_bytes, time_limit=1), resident=[model, sample])
    assert seen.resident_bytes < seen.peak_bytes <= plan.budget_bytes
    found = memfit.plan_of(model)
    assert found.unplanned_peak_bytes == plan.unplanned_peak_bytes > plan.budget_bytes
    assert found.times_measured


def test_checking_stays_inside_the_budget(planned):
    model, sample, plan = planned
    found = []
    seen = measure_peak(lambda: found.append(memfit.check(model, plan, sample)), resident=[model, sample])
    assert seen.peak_bytes <= plan.budget_bytes * 1.01
    assert found[0].exact
    assert "kept in a file" in found[0].how


# One planner at many budgets


@pytest.fixture(scope="module")
def planner(one_thread):
    torch.manual_seed(0)
    return make_region_planner(Branching(), Sample.of(images()), Recipe(budget=0.5, time_limit_s=1.0), ERROR)


def planned_at(planner, budget, **changes):
    return planner.plan(Recipe(budget=budget, time_limit_s=1.0, **changes))


def test_the_smaller_the_budget_the_slower(planner):
    plans = [planned_at(planner, budget) for budget in (0.9, 0.75, 0.6, "smallest")]
    times = [plan.extra_us for plan in plans]
    assert times == sorted(times)
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
    assert plans[-1].peak_bytes == min(plan.peak_bytes for plan in plans)


def test_a_step_that_fits_is_left_unplanned(planner):
    assert planned_at(planner, 1.0).is_identity


def test_a_budget_that_cannot_be_met_names_the_smallest(planner):
    with pytest.raises(InfeasibleBudget, match="a step of 3 regions, whose rest is left eager, needs") as caught:
        planned_at(planner, 0.1)
    assert planned_at(planner, caught.value.smallest_bytes).peak_bytes == caught.value.smallest_bytes
    with pytest.raises(InfeasibleBudget):
        planned_at(planner, caught.value.smallest_bytes - 1)


def test_the_budget_that_a_refusal_names_was_planned_for(monkeypatch):
    """Where the step around regions takes more within a bigger budget, the next refusal would name another one."""
    asked = []

    class Within:
        """Needs 100 bytes as measured within 50, and 120 within more."""

        def __init__(self, recipe):
            self.lowest_bytes = 100 if recipe.budget <= 50 else 120

        def limit_bytes(self, recipe):
            return recipe.budget

        def plan(self, recipe):
            asked.append(recipe.budget)
            if recipe.budget < self.lowest_bytes:
                raise InfeasibleBudget("no plan", smallest_bytes=self.lowest_bytes)
            return "a plan"

        has_plan = RegionPlanner.has_plan

    monkeypatch.setattr("memfit.regions.planner.make_region_planner", lambda _, __, recipe, ___: Within(recipe))
    with pytest.raises(InfeasibleBudget) as caught:
        plan_by_regions(None, None, Recipe(budget=50), ERROR)
    assert caught.value.smallest_bytes == 120
    assert asked == [50, 100, 50, 120]
    assert plan_by_regions(None, None, Recipe(budget=120), ERROR) == "a plan"


def test_an_optimizer_is_counted(one_thread):
    torch.manual_seed(0)
    model, sample = Branching(), images(4)
    counted = memfit.plan(model, sample, budget="1GiB", optimizer="adamw", time_limit=0.5)
    trained_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert counted.optimizer_state_bytes >= 2 * trained_bytes
    optimizer = torch.optim.AdamW(model.parameters())
    memfit.apply(counted, model, sample)

    def step():
        optimizer.zero_grad()
        loss = model(sample)
        loss.backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    measured = measure_peak(step, resident=[model, optimizer, sample])
    assert measured.peak_bytes == pytest.approx(counted.peak_bytes, rel=0.005)


def test_the_frontier_of_a_model_in_regions(one_thread):
    curve = memfit.frontier(Branching(), images(4), fractions=(0.8, 0.1), time_limit=1)
    assert [plan.regions.keys() for plan in curve] == [{"first", "second", "last"}] * len(curve)
    assert len(curve) == 2  # one point cannot be met


# What is refused as ever


def test_a_model_without_any_region_is_refused_as_ever():
    with pytest.raises(CaptureError, match="Nothing could not be captured: at its top level"):
        memfit.plan(Nothing(), torch.randn(4, 8), budget=0.5)


def test_a_model_without_any_region_is_left_as_it_is_where_its_step_fits():
    model, sample = Nothing(), torch.randn(4, 8)
    with pytest.warns(
        UserWarning, match="left as it is, a step of which takes .* nothing of it can be planned: Nothing"
    ):
        assert memfit.fit(model, sample, "1GiB", progress=False) is model
    assert memfit.plan_of(model) is None
    assert "forward" not in vars(model)
    with pytest.warns(UserWarning, match="left as it is"):  # the least that can be kept is the step as it is
        memfit.fit(model, sample, "smallest", progress=False)


def test_a_model_without_any_region_is_refused_where_its_step_is_over_the_budget():
    model, sample = Nothing(), torch.randn(4, 8)
    with pytest.raises(
        InfeasibleBudget, match=r"as it is, .* nothing of the model can be planned to take less"
    ) as info:
        memfit.fit(model, sample, 0.5, progress=False)
    assert "forward" not in vars(model)
    with pytest.warns(UserWarning, match="left as it is"):
        memfit.fit(model, sample, info.value.smallest_bytes, progress=False)
    measured = measure_peak(lambda: model(sample).sum().backward(), resident=[model, sample])
    assert measured.peak_bytes <= info.value.smallest_bytes


def test_a_model_without_memory_is_refused_as_ever():
    with memfit.without_weights():
        model, sample = Branching(), images(2)
    with pytest.raises(CaptureError, match="could not be captured"):
        memfit.plan(model, sample, budget=0.5)


@pytest.mark.parametrize(
    "wish", [{"budget": None}, {"recompute": [nn.ReLU]}, {"outputs": "loss"}, {"device": "A100-40GB"}]
)
def test_what_only_a_captured_model_can_be_given_is_refused(wish):
    with pytest.raises(CaptureError):
        memfit.plan(Branching(), images(2), **{"budget": 0.5} | wish)


def test_a_refusal_names_what_to_leave_out():
    with pytest.raises(CaptureError, match=r"could not be captured.* if outputs='loss' is left out$"):
        memfit.plan(Branching(), images(), budget="smallest", outputs="loss")


def test_a_plan_in_regions_is_the_same_after_a_round_trip(planner, tmp_path):
    plan = planned_at(planner, 0.6)
    plan.save(tmp_path / "plan.json")
    loaded = memfit.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert '"version":3' in (tmp_path / "plan.json").read_text()
    assert dataclasses.replace(loaded, budget_bytes=1).diff(plan).startswith("budget: 1 B -> ")
