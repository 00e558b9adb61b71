"""`memfit.profile`: figures that can be believed, and a model that stays as it is."""

import dataclasses
import json

import pytest
import torch
from budgeted import ConvNet, assert_untouched, images, state_of

import memfit
from memfit.errors import InvalidFile, InvalidInput

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def planned():
    torch.manual_seed(0)
    model, batch = ConvNet(), images(8)
    return model, memfit.plan(model, batch, budget=0.7), batch


@pytest.fixture(scope="module")
def profiled(planned):
    seen = []
    before = state_of(planned[0])
    profile = memfit.profile(*planned, pairs=3, eager=True, progress=lambda done, total: seen.append((done, total)))
    assert_untouched(planned[0], before)
    return profile, seen


def test_the_measured_peak_is_the_predicted_one_and_within_the_budget(planned, profiled):
    profile, plan = profiled[0], planned[1]
    assert profile.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    assert profile.eager_peak_bytes == pytest.approx(plan.unplanned_peak_bytes, rel=0.01)
    assert profile.fits
    assert "within the budget" in str(profile)


def test_times_are_those_of_steps(profiled):
    profile, seen = profiled
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert 0 < profile.step_s < 60
    assert -0.9 < profile.slowdown < 20  # the machine may be busy with something else
    assert "median of 3 pairs" in str(profile)


def test_without_eager_steps_there_is_nothing_to_compare_with(planned):
    profile = memfit.profile(*planned, pairs=1, eager=False)
    assert profile.eager_peak_bytes is None
    assert profile.slowdown is None
    assert profile.peak_bytes == pytest.approx(planned[1].peak_bytes, rel=0.01)
    assert "against eager" not in str(profile)


def test_the_optimizers_state_is_counted_where_the_plan_counts_it(planned):
    model, _, batch = planned
    plan = memfit.plan(model, batch, budget=0.7, optimizer="adamw")
    profile = memfit.profile(model, plan, batch, pairs=1, eager=True)
    assert profile.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    assert profile.eager_peak_bytes == pytest.approx(plan.unplanned_peak_bytes, rel=0.01)


def test_a_peak_over_the_budget_is_said(profiled):
    over = dataclasses.replace(profiled[0], budget_bytes=profiled[0].peak_bytes // 2)
    assert not over.fits
    assert "OVER the budget" in str(over)
    assert dataclasses.replace(over, budget_bytes=None).fits


def test_a_profile_is_written_as_json(profiled):
    written = json.loads(profiled[0].to_json())
    assert written["fits"] is True
    assert written["peak_bytes"] == profiled[0].peak_bytes


def test_what_cannot_be_profiled_is_refused(planned):
    model, plan, batch = planned
    with pytest.raises(InvalidInput, match="at least one pair"):
        memfit.profile(model, plan, batch, pairs=0)
    with pytest.raises(InvalidFile):
        memfit.profile(model, plan, images(3), pairs=1)
    assert "forward" not in model.__dict__


def test_a_model_that_is_fitted_stays_so(planned):
    _, plan, batch = planned
    model = memfit.fit(ConvNet(), batch, budget=0.9)
    memfit.profile(model, plan, batch, pairs=1, eager=True)
    assert memfit.plan_of(model).budget_bytes > plan.budget_bytes
