"""Reserved bytes of steps for CUDA devices: in estimates, plans, verdicts and budgets; none of it for a CPU."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import InfeasibleBudget, InvalidInput
from memfit.estimate import Estimate
from memfit.measure import devices
from memfit.measure.devices import find_device
from memfit.plan.plan import Plan

MIB = 2**20
WIDTH, ROWS = 512, 4096


def make_model():
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers), torch.zeros(ROWS, WIDTH)


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    return memfit.estimate(*make_model(), optimizer="adamw", device="A100-40GB", progress=False)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memfit.plan(*make_model(), budget=0.7, optimizer="sgd", device="A100-40GB", time_limit=1.0, progress=False)


def test_an_estimate_for_cuda_has_both_peaks_and_the_best_setting(estimate):
    assert estimate.reserved is not None
    assert estimate.peak_bytes <= estimate.reserved.allocated_bytes <= estimate.reserved_bytes
    assert estimate.reserved.best_reserved_bytes <= estimate.reserved_bytes
    assert estimate.to_dict()["reserved"]["reserved_bytes"] == estimate.reserved_bytes
    assert "reserved" in str(estimate)


def test_whether_it_fits_goes_by_the_least_with_which_the_allocator_serves_it(estimate):
    assert estimate.reserved_bytes >= estimate.needed_bytes == estimate.reserved.least_bytes > estimate.peak_bytes
    assert estimate.fits(estimate.needed_bytes)
    assert not estimate.fits(estimate.needed_bytes - 1)


def test_on_a_cpu_everything_is_as_it_was():
    estimate = memfit.estimate(*make_model(), measure=False, progress=False)
    assert estimate.reserved is None
    assert estimate.reserved_bytes is None
    assert estimate.needed_bytes == estimate.peak_bytes
    assert estimate.fits(estimate.peak_bytes)


def test_a_plan_for_cuda_knows_what_it_reserves_and_its_file_does_too(plan, tmp_path):
    assert plan.reserved is not None
    assert plan.peak_bytes <= plan.reserved.allocated_bytes <= plan.reserved.reserved_bytes
    assert "reserved" in str(plan)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(path).reserved == plan.reserved


def test_a_plan_for_cuda_is_of_the_operators_it_runs():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    found = memfit.plan(model, torch.zeros(64, 64), budget=1.0, device="A100-40GB", time_limit=1.0, progress=False)
    assert "aten.native_dropout.default" in {each.target for each in found.step.graph.operations}


def small_device(monkeypatch, usable_bytes):
    """An A100 with less memory."""
    small = dataclasses.replace(
        find_device("A100-40GB"), name="A100-small", memory_bytes=usable_bytes + find_device("A100-40GB").reserved_bytes
    )
    monkeypatch.setattr(devices, "DEVICES", (*devices.DEVICES, small))


def test_a_budget_of_the_device_is_kept_by_what_is_reserved(monkeypatch):
    unplanned = memfit.estimate(*make_model(), optimizer="sgd", device="A100-40GB", progress=False)
    usable_bytes = int(0.85 * unplanned.reserved_bytes)
    small_device(monkeypatch, usable_bytes)
    found = memfit.plan(
        *make_model(), budget="device", optimizer="sgd", device="A100-small", time_limit=1.0, progress=False
    )
    assert found.reserved.reserved_bytes <= usable_bytes == found.budget_bytes
    assert not found.is_identity


def test_a_device_on_which_nothing_can_be_reserved_is_refused(monkeypatch):
    small_device(monkeypatch, 20 * MIB)
    with pytest.raises(InfeasibleBudget):
        memfit.plan(*make_model(), budget="device", device="A100-small", time_limit=1.0, progress=False)


def test_a_budget_of_reserved_bytes_is_kept():
    unplanned = memfit.estimate(*make_model(), optimizer="sgd", device="A100-40GB", progress=False)
    reserved_bytes = int(0.9 * unplanned.reserved_bytes)
    found = memfit.plan(
        *make_model(), reserved=reserved_bytes, optimizer="sgd", device="A100-40GB", time_limit=1.0, progress=False
    )
    assert found.reserved.reserved_bytes <= reserved_bytes == found.budget_bytes


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"reserved": "1GiB"}, "name a CUDA device"),
        ({"reserved": "1GiB", "budget": 0.5, "device": "T4"}, "a budget by itself"),
        ({"reserved": "1GiB", "process": "1GiB"}, "a budget by itself"),
        ({"reserved": "much", "device": "T4"}, "not a number of bytes"),
    ],
)
def test_a_budget_of_reserved_bytes_that_cannot_be_meant_is_refused(keywords, words):
    with pytest.raises(InvalidInput, match=words):
        memfit.plan(*make_model(), **keywords)


def test_a_budget_of_the_device_needs_its_name():
    with pytest.raises(InvalidInput, match="name it with device="):
        memfit.plan(*make_model(), budget="device")


def test_json_of_an_estimate_can_be_read_by_machines(estimate):
    assert json.loads(estimate.to_json())["reserved"]["best_setting"] == estimate.reserved.best_setting


@pytest.mark.slow
def test_half_of_gpt2s_activations_fit_an_a100s_reserved_bytes():
    transformers = pytest.importorskip("transformers")
    with memfit.without_weights():
        config = transformers.GPT2Config(use_cache=False, loss_type="ForCausalLM")
        model = transformers.GPT2LMHeadModel(config).train()
        tokens = torch.empty(8, 1024, dtype=torch.int64)
    given = {
        "loss": lambda model, batch: model(input_ids=batch, labels=batch).loss,
        "optimizer": "adamw",
        "device": "A100-40GB",
        "progress": False,
    }
    unplanned = memfit.estimate(model, tokens, **given)
    budget_bytes = unplanned.reserved_bytes - unplanned.by_kind()["activation"] // 2
    plan = memfit.plan(model, tokens, reserved=budget_bytes, time_limit=10, **given)
    assert plan.reserved.reserved_bytes <= budget_bytes < 0.7 * unplanned.reserved_bytes
    assert plan.slowdown < 0.1
