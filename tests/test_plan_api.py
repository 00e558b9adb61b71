"""`memfit.plan`, `memfit.apply` and `memfit.frontier`: budgets, manual control, files and refusals."""

import copy
import dataclasses
import itertools
import json
import math

import pytest
import torch
from budgeted import (
    BLOCKS,
    MIB,
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
from memfit.errors import InfeasibleBudget, InvalidBudget, InvalidFile, InvalidInput, InvalidModel
from memfit.ir import Compute
from memfit.plan.plan import Treatment
from memfit.plan.solve import Found

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return ConvNet(), images()


@pytest.fixture(scope="module")
def tight(net):
    """A plan that has to compute something again."""
    return memfit.plan(*net, budget=0.7)


@pytest.fixture(scope="module")
def unplanned_bytes(tight):
    return tight.unplanned_peak_bytes


def made_again(plan):
    """Which of the model's own operations run more than once."""
    runs = [each.operation for each in (*plan.program.forward, *plan.program.backward) if isinstance(each, Compute)]
    return {operation for operation in runs if runs.count(operation) > 1}


def values(plan, treatment, module=""):
    return {fate.value for fate in plan.fates if fate.treatment is treatment and fate.module.startswith(module)}


# Budgets


@pytest.mark.parametrize(("budget", "expected_bytes"), [(2_000_000, 2_000_000), ("2MiB", 2 * MIB), ("2 MB", 2_000_000)])
def test_a_budget_is_bytes(net, budget, expected_bytes):
    plan = memfit.plan(*net, budget=budget)
    assert plan.budget_bytes == expected_bytes
    assert plan.peak_bytes <= expected_bytes
    assert not plan.is_identity


def test_a_budget_is_a_fraction_of_the_unplanned_peak(tight):
    assert tight.budget_bytes == int(0.7 * tight.unplanned_peak_bytes)
    assert tight.peak_bytes <= tight.budget_bytes
    assert tight.extra_us > 0
    assert 0 <= tight.lower_bound <= tight.slowdown + 1e-9


def test_the_smallest_budget_is_that_of_the_plan(net, tight):
    plan = memfit.plan(*net, budget="smallest")
    assert plan.peak_bytes <= plan.budget_bytes < tight.peak_bytes
    assert plan.floor_bytes <= plan.budget_bytes
    assert "convolution" in plan.floor_operation


def test_a_budget_above_the_peak_gives_the_unplanned_step_and_says_so(net):
    plan = memfit.plan(*net, budget="1GiB")
    assert plan.is_identity
    assert not made_again(plan)
    assert "the unplanned step fits" in str(plan)


@pytest.mark.parametrize("budget", [-1, 0, 0.0, -0.5, math.nan, math.inf, -math.inf, True, "", "0", "-1GiB", "nan"])
def test_what_is_no_budget_is_refused(net, budget):
    before = state_of(net[0])
    with pytest.raises(InvalidBudget):
        memfit.plan(*net, budget=budget)
    with pytest.raises(InvalidBudget):
        memfit.fit(*net, budget=budget)
    assert_untouched(net[0], before)


@pytest.mark.parametrize(("budget", "words"), [("6 parsecs", "unknown unit 'parsecs'"), ("half", "'half'")])
def test_an_unknown_unit_is_named(net, budget, words):
    with pytest.raises(InvalidBudget, match=words):
        memfit.plan(*net, budget=budget)


def test_an_unknown_technique_is_answered_with_all_there_are(net):
    with pytest.raises(InvalidInput) as refused:
        memfit.plan(*net, budget=0.7, allow=("recompute", "magic"))
    assert "'magic'" in str(refused.value)
    for name, meaning in memfit.TECHNIQUES.items():
        assert f"{name!r} ({meaning})" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"time_limit": -1}, "time limit"),
        ({"time_limit": math.nan}, "time limit"),
        ({"optimizer": "no_such"}, "unknown optimizer"),
        ({"device": "C64"}, "device 'C64'"),
        ({"outputs": "logits"}, "outputs"),
        ({"backward_from": "nowhere"}, "backward_from"),
        ({"recompute": "no_such.*"}, "matches no value"),
        ({"recompute": [3.5]}, "3.5"),
    ],
)
def test_other_options_that_cannot_be_meant_are_refused(net, options, words):
    before = state_of(net[0])
    with pytest.raises(InvalidInput, match=words):
        memfit.plan(*net, budget=0.7, **options)
    assert_untouched(net[0], before)


def test_below_the_floor_the_smallest_budget_and_the_operator_are_said(net):
    before = state_of(net[0])
    with pytest.raises(InfeasibleBudget) as refused:
        memfit.plan(*net, budget=0.1)
    error = refused.value
    assert error.floor_bytes <= error.smallest_bytes
    assert "convolution" in error.operation
    assert error.operation in str(error)
    assert "a smaller batch" in str(error)
    assert "'chunk'" not in str(error)  # which makes no convolution smaller
    assert_untouched(net[0], before)
    assert memfit.plan(*net, budget=error.smallest_bytes).peak_bytes <= error.smallest_bytes


# What a plan knows


def test_planning_leaves_the_model_and_the_generator_alone(net):
    model, batch = copy.deepcopy(net[0]), net[1]
    before = state_of(model)
    memfit.plan(model, batch, budget=0.7)
    assert_untouched(model, before)


def test_the_optimizer_is_part_of_the_budget(net, tight):
    plan = memfit.plan(*net, budget=0.7, optimizer="adamw")
    parameter_bytes = sum(each.numel() * each.element_size() for each in net[0].parameters())
    assert plan.optimizer == "adamw"
    assert 2 * parameter_bytes <= plan.optimizer_state_bytes < 2 * parameter_bytes + 1000
    assert plan.unplanned_peak_bytes == tight.unplanned_peak_bytes + plan.optimizer_state_bytes


def test_a_device_that_is_not_here_is_planned_for_by_estimated_times(net, tight):
    plan = memfit.plan(*net, budget=0.7, device="A100-40GB")
    assert tight.times_measured
    assert not plan.times_measured
    assert plan.device == "A100-40GB"


def test_a_model_without_weights_is_planned_and_the_plan_serves_the_real_one(net):
    with memfit.without_weights():
        model, batch = ConvNet(), images()
    plan = memfit.plan(model, batch, budget=0.7)
    assert not plan.times_measured
    real = copy.deepcopy(net[0])
    memfit.apply(plan, real, net[1])
    assert_same(step(copy.deepcopy(net[0]), net[1]), step(real, net[1]))


def test_the_best_so_far_is_reported(net):
    seen = []
    memfit.plan(*net, budget=0.7, report=seen.append)
    assert all(isinstance(each, Found) for each in seen)
    assert seen[-1].slowdown is not None


def test_a_search_without_time_still_gives_a_plan(net):
    plan = memfit.plan(*net, budget=0.8, time_limit=0)
    assert plan.peak_bytes <= plan.budget_bytes


def test_an_interrupted_search_gives_the_best_so_far(net):
    seen = []

    def interrupt(found):
        seen.append(found)
        if found.slowdown is not None and len(seen) == 1:
            raise KeyboardInterrupt

    plan = memfit.plan(*net, budget=0.7, report=interrupt)
    assert plan.peak_bytes <= plan.budget_bytes
    assert any("interrupted" in line for line in plan.log)


def test_a_fitted_model_can_be_planned_anew(net):
    model = memfit.fit(copy.deepcopy(net[0]), net[1], budget=0.8)
    plan = memfit.plan(model, net[1], budget=0.7)
    assert memfit.plan_of(model).budget_bytes > plan.budget_bytes


# Manual control


def test_types_of_modules_are_computed_again(net):
    plan = memfit.plan(*net, budget=None, recompute=[nn.ReLU])
    assert plan.budget_bytes is None
    assert {fate.module for fate in plan.fates if fate.treatment is Treatment.AGAIN} == {
        f"layers.{number}.2" for number in range(BLOCKS)
    }


def test_patterns_of_names_are_computed_again_from_what_came_in(net):
    plan = memfit.plan(*net, budget=None, recompute="layers.?")
    again = {fate.module for fate in plan.fates if fate.treatment is Treatment.AGAIN}
    assert again == {f"layers.{number}.0" for number in range(BLOCKS)}
    assert all(values(plan, Treatment.KEPT, f"layers.{number}.2") for number in range(BLOCKS))


def test_a_number_means_segments_of_blocks_as_checkpoints_do(net):
    plan = memfit.plan(*net, budget=None, recompute=[2])
    kept = {fate.module for fate in plan.fates if fate.treatment is Treatment.KEPT and fate.size_bytes > 1000}
    assert kept == {"stem", "layers.1.2", "layers.3.2", "dropout"}


def test_what_is_to_be_computed_again_is_so_even_if_all_fits(net):
    plan = memfit.plan(*net, budget="1GiB", recompute=[nn.ReLU])
    assert {fate.module for fate in plan.fates if fate.treatment is Treatment.AGAIN} >= {"layers.0.2", "layers.3.2"}


def test_what_is_to_be_kept_is_kept(net, tight):
    again = {fate.module for fate in tight.fates if fate.treatment is Treatment.AGAIN}
    plan = memfit.plan(*net, budget=0.7, keep=sorted(again)[0])
    assert not values(plan, Treatment.AGAIN, sorted(again)[0])
    assert plan.peak_bytes <= plan.budget_bytes


def test_recompute_alone_uses_no_alternative():
    plan = memfit.plan(Perceptron(), rows(), budget=0.7, allow="recompute")
    assert made_again(plan)
    assert not values(plan, Treatment.REPLACED)
    assert plan.allow == ("recompute",)


@pytest.mark.parametrize("budget", [0.8, 0.7, "smallest"])
def test_lean_alone_computes_nothing_of_the_models_own_again(budget):
    plan = memfit.plan(Perceptron(), rows(), budget=budget, allow=("lean",))
    assert not made_again(plan)
    assert values(plan, Treatment.REPLACED)
    assert not values(plan, Treatment.AGAIN)


# Files


def test_a_plan_goes_through_a_file_and_trains_bit_for_bit(net, tight, tmp_path):
    tight.save(tmp_path / "plan.json")
    plan = memfit.Plan.load(tmp_path / "plan.json")
    assert plan == tight
    eager, planned = copy.deepcopy(net[0]), copy.deepcopy(net[0])
    assert memfit.apply(plan, planned, net[1]) is planned
    for seed in range(3):
        assert_same(step(eager, net[1], seed), step(planned, net[1], seed))
    assert memfit.plan_of(planned) == tight


def test_without_a_sample_a_plan_is_applied_at_the_first_call(net, tight):
    eager, planned = copy.deepcopy(net[0]), copy.deepcopy(net[0])
    memfit.apply(tight, planned)
    assert not planned.forward.calls
    assert_same(step(eager, net[1]), step(planned, net[1]))


def frozen(model):
    model.stem.requires_grad_(False)
    return model


def of_another_mode(model):
    model.layers[0][1].eval()
    return model


class Other(ConvNet):
    pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: Other(), "made for a ConvNet, the model is a Other"),
        (lambda _: ConvNet(4), "other parameters or buffers"),
        (lambda model: model.double(), "other parameters or buffers"),
        (frozen, "which are trained differ"),
        (of_another_mode, "made for another computation"),
    ],
)
def test_a_plan_of_another_model_is_refused_by_name(net, tight, change, words):
    model = change(copy.deepcopy(net[0]))
    before = state_of(model)
    batch = net[1].to(next(model.parameters()).dtype)
    with pytest.raises(InvalidFile, match=words):
        memfit.apply(tight, model, batch)
    assert_untouched(model, before)


@pytest.mark.parametrize("batch", [images(4), images().permute(0, 1, 3, 2)[..., :16]])
def test_a_plan_of_another_shape_is_refused_by_name(net, tight, batch):
    before = state_of(net[0])
    with pytest.raises(InvalidFile, match=r"float32\[8, 3, 32, 32\], the sample is float32"):
        memfit.apply(tight, net[0], batch)
    assert_untouched(net[0], before)


def test_a_program_that_does_not_fit_the_graph_is_refused(net, tight):
    program = dataclasses.replace(tight.program, backward=tight.program.backward[:-4])
    with pytest.raises(InvalidFile, match="plan again"):
        memfit.apply(dataclasses.replace(tight, program=program), net[0], net[1])
    assert "forward" not in net[0].__dict__


def test_what_is_no_plan_cannot_be_applied(net, tight):
    with pytest.raises(InvalidInput, match="a Plan was expected, a str was given"):
        memfit.apply("plan.json", net[0])
    with pytest.raises(InvalidModel, match="eval mode"):
        memfit.apply(tight, copy.deepcopy(net[0]).eval())


# The curve


@pytest.fixture(scope="module")
def curve(net):
    seen = []
    return memfit.frontier(*net, fractions=(0.5, 0.9, 0.7, 0.05), report=seen.append), seen


def test_a_smaller_budget_is_never_faster(curve):
    plans = list(curve[0])
    assert len(plans) >= 3
    for bigger, smaller in itertools.pairwise(plans):
        assert smaller.budget_bytes <= bigger.budget_bytes
        assert smaller.extra_us >= bigger.extra_us
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)


def test_budgets_are_fractions_of_the_activation_part_and_the_smallest(curve):
    first = curve[0].plans[0]
    part_bytes = first.unplanned_peak_bytes - first.persistent_bytes
    assert first.budget_bytes == first.persistent_bytes + int(0.9 * part_bytes)
    assert len(curve[1]) == len(curve[0])  # 0.05 is below the smallest, which is there
    assert curve[0].plans[-1].peak_bytes == min(plan.peak_bytes for plan in curve[1])


def test_the_curve_is_readable_and_can_be_written(curve):
    assert len(str(curve[0]).splitlines()) == len(curve[0])
    written = json.loads(curve[0].to_json())
    assert [point["peak_bytes"] for point in written["points"]] == [plan.peak_bytes for plan in curve[0]]


@pytest.mark.parametrize("fractions", [(0.0,), (1.5,), (0.5, -0.1), (math.nan,)])
def test_fractions_that_are_none_are_refused_at_once(net, fractions):
    with pytest.raises(InvalidBudget, match="fraction of the activation part"):
        memfit.frontier(*net, fractions=fractions)


# Models of libraries


def test_resnet18():
    import torchvision

    model, batch = torchvision.models.resnet18(num_classes=10), torch.randn(2, 3, 32, 32)
    plan = memfit.plan(model, batch, budget=None, recompute="layer?.?")
    assert {fate.module.partition(".")[0] for fate in plan.fates if fate.runs_again} == {
        "layer1",
        "layer2",
        "layer3",
        "layer4",
    }
    assert memfit.check(model, plan, batch).exact


def test_gpt2_with_its_loss(tiny_gpt2):
    words = torch.randint(100, (4, 32))
    model, batch = tiny_gpt2(), {"input_ids": words, "labels": words.clone()}
    plan = memfit.plan(model, batch, budget=0.8, outputs="loss")
    assert not plan.is_identity
    assert plan.sample == "input_ids: int64[4, 32], labels: int64[4, 32]"
    assert memfit.check(model, plan, batch).exact
