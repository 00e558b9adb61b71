import logging

import pytest
import torch
from torch import nn

import memfit
from memfit import pipeline, process_budget
from memfit.measure.available import Available
from memfit.measure.process import RuntimeMemory
from memfit.process_budget import ProcessLimit, plain_budget_bytes

MIB = 2**20
RUNTIME = RuntimeMemory(
    eager_bytes=MIB // 4,
    planned_bytes=MIB // 2,
    operation_bytes=100,
    eager_mapped_bytes=MIB // 2,
    planned_mapped_bytes=MIB,
)


@pytest.fixture(autouse=True)
def _known_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose libraries take nothing and whose runtime takes what was measured once."""
    own = process_budget.process_peak
    monkeypatch.setattr(process_budget, "_PLANNING_BYTES", 0)
    monkeypatch.setattr(process_budget, "release_freed_memory", lambda: True)
    monkeypatch.setattr(process_budget, "runtime_memory", lambda: RUNTIME)
    monkeypatch.setattr(
        process_budget, "process_peak", lambda *args, **options: own(*args, **options, operators={}, runtime=RUNTIME)
    )


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """Sets what is free."""

    def set_free(free_bytes: int, limit: str = "host") -> None:
        found = Available(free_bytes=free_bytes, limit=limit, parts={limit: free_bytes})
        monkeypatch.setattr(process_budget, "available", lambda _device: found)

    return set_free


def chain() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(2048, 64)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("limit", ["host", "RLIMIT_DATA"])
def test_what_is_available_is_what_the_process_takes(free, limit, caplog) -> None:
    model, batch = chain()
    free(8 * MIB, limit)
    with caplog.at_level(logging.INFO):
        memfit.fit(model, batch, "available", time_limit=2)
    plan = memfit.plan_of(model)
    assert plan is not None
    assert not plan.is_identity
    assert plan.process_peak_bytes is not None
    held_bytes = batch.nbytes + sum(each.nbytes for each in model.parameters())
    assert plan.peak_bytes < plan.process_peak_bytes <= held_bytes + 8 * MIB
    assert f"8.00 MiB free ({limit})" in caplog.text


@pytest.mark.usefixtures("one_thread")
def test_a_budget_of_the_process_leaves_less_for_tensors(free) -> None:
    model, batch = chain()
    free(2**40)
    plan = memfit.plan(model, batch, process="8MiB", time_limit=2)
    assert plan.process_peak_bytes is not None
    assert plan.process_peak_bytes <= 8 * MIB
    assert plan.peak_bytes < 8 * MIB - RUNTIME.planned_bytes


@pytest.mark.usefixtures("one_thread")
def test_where_all_fits_nothing_is_planned(free) -> None:
    model, batch = chain()
    free(2**33)
    memfit.fit(model, batch, budget="available")
    plan = memfit.plan_of(model)
    assert plan is not None
    assert plan.is_identity


@pytest.mark.usefixtures("one_thread")
def test_with_nothing_to_spare_the_smallest_that_would_do_is_told(free) -> None:
    model, batch = chain()
    free(1000)
    with pytest.raises(memfit.InfeasibleBudget, match="the smallest that would do is") as refused:
        memfit.plan(model, batch, budget="available", time_limit=1)
    assert refused.value.smallest_bytes > batch.nbytes
    assert not hasattr(model.forward, "calls")


@pytest.mark.usefixtures("one_thread")
def test_the_smallest_process_that_is_told_works_when_it_is_given_back(free, monkeypatch) -> None:
    model, batch = chain()
    free(2**33)
    monkeypatch.setattr(process_budget, "_PLANNING_BYTES", 32 * MIB)
    with pytest.raises(memfit.InfeasibleBudget, match="are set aside for planning") as refused:
        memfit.plan(model, batch, process="20MiB", time_limit=1)
    assert refused.value.smallest_bytes is not None
    assert f"process='{refused.value.smallest_bytes // MIB}MiB'" in str(refused.value)
    memfit.plan(model, batch, process=refused.value.smallest_bytes, time_limit=1)


def test_a_budget_above_what_is_free_is_said_with_both_numbers(monkeypatch, caplog) -> None:
    model, batch = nn.Linear(8, 8), torch.randn(4, 8)
    memfit.plan(model, batch, budget="1024TiB")
    assert "a budget of 1024.00 TiB is above what there is here" in caplog.text


def test_two_budgets_are_refused() -> None:
    model, batch = chain()
    with pytest.raises(memfit.InvalidInput, match="both budget and process"):
        memfit.plan(model, batch, budget="1MiB", process="1MiB")


def test_what_is_available_elsewhere_cannot_be_told() -> None:
    model, batch = chain()
    with pytest.raises(memfit.InvalidBudget, match="a device that is here"):
        memfit.plan(model, batch, budget="available", device="T4")


@pytest.mark.parametrize(("mapped", "taken"), [(True, MIB), (False, MIB // 2)])
def test_a_step_that_is_not_known_yet_leaves_what_the_runtime_takes(mapped, taken) -> None:
    limit = ProcessLimit(limit_bytes=100 * MIB, counts_mapped=mapped, is_measured=True)
    assert plain_budget_bytes(limit) == int(0.97 * (100 * MIB - taken))
    unknown = ProcessLimit(limit_bytes=100 * MIB, counts_mapped=mapped, is_measured=False)
    assert plain_budget_bytes(unknown) == 100 * MIB


@pytest.mark.usefixtures("one_thread")
def test_where_the_process_cannot_be_measured_tensors_may_take_all(free, monkeypatch) -> None:
    monkeypatch.setattr(process_budget, "can_be_measured", lambda _: False)
    monkeypatch.setattr(pipeline, "peak_of_process", lambda *_, **__: pytest.fail("measured"))
    model, batch = chain()
    free(8 * MIB)
    plan = memfit.plan(model, batch, budget="available", time_limit=1)
    assert plan.process_peak_bytes is None
    assert plan.budget_bytes > 8 * MIB * 0.97


@pytest.mark.usefixtures("one_thread")
def test_steps_and_batches_take_what_is_available(free) -> None:
    model, batch = chain()
    free(8 * MIB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = memfit.Step(model, optimizer, lambda model, batch: model(batch).square().mean(), budget="available")
    step(batch)
    assert step.choice.budget_bytes < 10 * MIB
    assert memfit.max_batch(model, batch[:4], "available") > 16
