"""Steps, remembered plans, other devices than the current one, and what a step must not do twice."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from accelerator.simulated_device import NAME, set_capacity, taken_log
from memfit.accelerator import MemoryWatch, accelerator_of, device_of_backend, generator_states
from memfit.errors import InvalidModel
from memfit.measure.available import available
from memfit.measure.peak import PeakWatch, measure_peak
from memfit.measure.probe import device_name, measured_costs
from memfit.measure.signature import encode
from memfit.step.random_state import random_state, set_random_state


def model_and_batch(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    return model.to(device), torch.randn(128, 64).to(device)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def trained(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int = 3) -> nn.Module:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return model


def are_equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("update", ["after", "inside"])
def test_state_in_host_memory_makes_the_bits_of_eager(device: torch.device, update: str) -> None:
    eager, batch = model_and_batch(device)
    stepped = copy.deepcopy(eager)
    optimizer = torch.optim.AdamW(stepped.parameters())
    step = memfit.Step(stepped, optimizer, loss, state_tier="host", update=update)
    torch.manual_seed(1)
    for _ in range(3):
        step(batch)
    torch.manual_seed(1)
    trained(eager, batch, torch.optim.AdamW(eager.parameters()))
    assert are_equal(eager, stepped)
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name == "exp_avg"]
    assert all(value.device.type == "cpu" and value.is_pinned() for value in moments)
    assert any(line.startswith("to host") and "the host waits" not in line for line in taken_log())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_runs_on_the_device(device: torch.device, precision: str) -> None:
    model, batch = model_and_batch(device)
    step = memfit.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, precision=precision)
    first, *_, last = [float(step(batch)) for _ in range(4)]
    assert last < first


def test_a_plan_under_autocast_makes_the_bits_of_eager(device: torch.device) -> None:
    eager, batch = model_and_batch(device)
    planned = copy.deepcopy(eager)
    with torch.autocast(NAME, torch.bfloat16):
        memfit.fit(planned, batch, budget="smallest")
        gradients = []
        for model in (eager, planned):
            torch.manual_seed(1)
            value = loss(model, batch)
            with torch.autocast(NAME, enabled=False):
                value.backward()
            gradients.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_remembered_plan_is_found_for_the_same_device(device: torch.device, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    model, batch = model_and_batch(device)
    memfit.fit(copy.deepcopy(model), batch, budget=0.9)
    kept = [*(tmp_path / "plans").rglob("*.json")]
    assert kept
    again = copy.deepcopy(model)
    memfit.fit(again, batch, budget=0.9)
    assert [*(tmp_path / "plans").rglob("*.json")] == kept
    assert loss(again, batch).device == device


def test_what_is_asked_is_asked_of_the_device_of_the_tensors() -> None:
    other = torch.device(NAME, 1)
    set_capacity(2**28, 1)
    model, batch = model_and_batch(other)
    assert torch.accelerator.current_device_index() == 0
    assert available(other).free_bytes < 2**28 < available(torch.device(NAME, 0)).free_bytes
    estimate = memfit.estimate(model, batch, loss=loss)

    def train() -> None:
        model.zero_grad()
        loss(model, batch).backward()

    train()
    model.zero_grad()
    measured = measure_peak(train, resident=[model, batch])
    assert estimate.peak_bytes == pytest.approx(measured.peak_bytes, abs=8192)
    plan = memfit.plan(model, batch, budget=0.9)
    assert memfit.check(model, plan, batch).exact
    watch = PeakWatch()
    model.zero_grad()
    watch.start(resident=[model, batch])
    train()
    found = watch.stop()
    assert found is not None
    assert found.peak_bytes == measured.peak_bytes


def test_tensors_on_two_devices_are_refused_in_words() -> None:
    tensors = [torch.zeros(1, device=torch.device(NAME, index)) for index in range(2)]
    with pytest.raises(InvalidModel, match=f"{NAME}:0, {NAME}:1"):
        accelerator_of(tensors)


def test_a_budget_is_kept_where_more_memory_is_not_there(device: torch.device) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 512), nn.Sigmoid(), nn.Linear(512, 64), nn.Sigmoid()) for _ in range(4)]
    model, batch = nn.Sequential(*blocks).to(device), torch.randn(1024, 64).to(device)
    plan = memfit.plan(model, batch, budget=0.75, loss=loss, time_limit=2)
    memfit.apply(plan, model, batch)
    loss(model, batch).backward()
    model.zero_grad()
    elsewhere_bytes = torch.accelerator.memory_allocated() - sum(each.nbytes for each in model.parameters())
    set_capacity(plan.peak_bytes + elsewhere_bytes - batch.nbytes + 16384)
    loss(model, batch).backward()
    memfit.remove(model)
    model.zero_grad()
    with pytest.raises(torch.OutOfMemoryError):
        loss(model, batch).backward()


def test_the_state_of_generators_is_kept_with_a_run(device: torch.device) -> None:
    state = random_state()
    drawn = torch.rand(3, device=device), torch.rand(3, device=torch.device(NAME, 1))
    set_random_state(state)
    assert torch.equal(torch.rand(3, device=device), drawn[0])
    assert torch.equal(torch.rand(3, device=torch.device(NAME, 1)), drawn[1])
    assert set(generator_states([device])) == {"cpu", str(device)}


def test_state_on_disk_makes_the_bits_of_eager(device: torch.device, tmp_path: Path) -> None:
    eager, batch = model_and_batch(device)
    stepped = copy.deepcopy(eager)
    step = memfit.Step(
        stepped, torch.optim.AdamW(stepped.parameters()), loss, state_tier="disk", directory=str(tmp_path)
    )
    torch.manual_seed(1)
    for _ in range(3):
        step(batch)
    torch.manual_seed(1)
    assert are_equal(trained(eager, batch, torch.optim.AdamW(eager.parameters())), stepped)


def test_blocks_are_not_taken_for_workspaces(device: torch.device) -> None:
    small = torch.zeros(999, device=device)
    signature = encode(torch.ops.aten.add.Tensor, (small, small), {})
    cost = measured_costs([signature], device=str(device))[signature]
    assert (cost.workspace_bytes, cost.output_bytes) == (0, (999 * 4,))


def test_operators_are_measured_without_the_autocast_that_is_on_there(device: torch.device) -> None:
    rows = torch.zeros(32, 32, device=device)
    signature = encode(torch.ops.aten.mm.default, (rows, rows), {})
    with torch.autocast(NAME, torch.bfloat16):
        cost = measured_costs([signature], device=str(device))[signature]
    assert cost.output_bytes == (rows.nbytes,)


def test_the_backward_of_cudnn_batch_norm_is_measured(device: torch.device) -> None:
    images, row = torch.zeros(4, 8, 16, 16, device=device), torch.ones(8, device=device)
    reserve = torch.zeros(0, dtype=torch.uint8, device=device)
    arguments = (images, images, row, row, row, row, row, 1e-5, reserve)
    signature = encode(torch.ops.aten.cudnn_batch_norm_backward.default, arguments, {})
    assert measured_costs([signature], device=str(device))[signature].output_bytes[0] == images.nbytes


def test_costs_are_not_those_of_other_settings(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    before = device_name(str(device))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert device_name(str(device)) != before


class AsksAboutConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(1000, device=rows.device)
        if bool((steps == steps).all()):
            rows = rows + 1
        return self.layer(rows).sum()


def test_values_that_a_trace_knows_take_no_memory_of_the_device(device: torch.device) -> None:
    model, rows = AsksAboutConstants().to(device), torch.ones(4, 8).to(device)
    watch = MemoryWatch(device)
    memfit.estimate(model, rows, measure=False)
    assert watch.rise_bytes() < 8000


def test_ranks_talk_through_the_device_that_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: NAME)
    with torch.accelerator.device_index(1):
        assert device_of_backend() == torch.device(NAME, 1)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    assert device_of_backend() == torch.device("cpu")


class CudnnNormalized(nn.Module):
    """Calls the operator that batch norm is on CUDA: it writes its statistics, and its schema does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        hidden = torch.cudnn_batch_norm(
            self.first(images), norm.weight, norm.bias, norm.running_mean, norm.running_var, True, 0.1, 1e-5
        )[0]
        return self.last(F.gelu(hidden)).square().mean()


def test_statistics_of_cudnn_batch_norm_are_updated_once(device: torch.device) -> None:
    torch.manual_seed(0)
    eager, images = CudnnNormalized().to(device), torch.randn(16, 8, 32, 32).to(device)
    for budget in (None, "smallest"):
        planned = copy.deepcopy(eager)
        memfit.fit(planned, images, budget=budget)
        plain = copy.deepcopy(eager)
        for model in (plain, planned):
            model(images).backward()
        assert torch.equal(plain.norm.running_mean, planned.norm.running_mean)
        assert torch.equal(plain.norm.running_var, planned.norm.running_var)
        assert all(
            torch.equal(one.grad, other.grad)
            for one, other in zip(plain.parameters(), planned.parameters(), strict=True)
        )
