"""What is in host memory for a while: activations, optimizer state; copied beside the computation, in order."""

import copy

import pytest
import torch
from torch import nn

import memfit
from accelerator.simulated_device import taken_log, taken_races
from memfit.capture.rehearse import step
from memfit.capture.sample import Sample
from memfit.ir import Compute
from memfit.measure.peak import measure_peak
from memfit.transfers import arrived, transfers_of


def model_and_batch(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 512), nn.Sigmoid(), nn.Linear(512, 64)) for _ in range(3)))
    return model.to(device), torch.randn(1024, 64).to(device)


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(batch).square().mean().backward()
    return [each.grad.clone() for each in model.parameters()]


def test_a_copy_to_the_host_and_back_races_with_nothing(device: torch.device) -> None:
    values = torch.randn(100_000, device=device)
    transfers = transfers_of(device)
    sent = transfers.to_host(values)
    assert sent.is_pinned()
    expected = values.clone()
    del values  # while its copy may still be running
    back = arrived(transfers.to_device(sent))
    assert torch.equal(back + 0, expected)
    log = taken_log()
    assert "to host 400000 on 1" in log or any(line.startswith("to host 400000 on ") for line in log)
    assert not any("400000" in line and "the host waits" in line for line in log)
    assert "record_stream" in " ".join(log)


def test_the_device_tells_what_was_read_too_early(device: torch.device) -> None:
    sent = transfers_of(device).to_host(torch.ones(1000, device=device))
    coming = transfers_of(device).to_device(sent)
    coming + 1  # without `arrived`
    races = taken_races()
    assert len(races) == 1
    assert "did not wait for stream" in races[0]


def test_offloaded_values_take_no_memory_of_the_device(device: torch.device) -> None:
    eager, batch = model_and_batch(device)
    planned = copy.deepcopy(eager)
    plan = memfit.plan(planned, batch, budget=0.75, allow=("offload",), time_limit=2)
    assert plan.pinned_bytes == 2**21
    assert "2.00 MiB of pinned host memory" in str(plan)
    memfit.apply(plan, planned, batch)
    assert all(map(torch.equal, gradients(eager, batch), gradients(planned, batch)))
    sample = Sample.of(batch)
    planned.zero_grad()
    peak = measure_peak(lambda: step(planned, sample, seed=0), resident=[planned, batch])
    assert peak.peak_bytes == pytest.approx(plan.peak_bytes, abs=8192)
    assert peak.peak_bytes < 0.8 * plan.unplanned_peak_bytes


def test_values_are_brought_back_before_they_are_read(device: torch.device) -> None:
    model, batch = model_and_batch(device)
    plan = memfit.plan(model, batch, budget=0.75, allow=("offload",), time_limit=2)
    memfit.apply(plan, model, batch)
    gradients(model, batch)
    taken_log()
    gradients(model, batch)
    log = taken_log()
    assert any(line.startswith("to host 2097152 on ") for line in log)
    assert any(line.startswith("to device 2097152 on ") for line in log)
    assert not any("2097152" in line and "the host waits" in line for line in log)


def test_a_plan_asks_for_values_some_operators_before_they_are_read(device: torch.device) -> None:
    model, batch = model_and_batch(device)
    plan = memfit.plan(model, batch, budget=0.75, allow=("offload",), time_limit=2)
    assert plan.step is not None
    graph = plan.step.graph
    runs = [each.operation for each in plan.program.backward if isinstance(each, Compute)]
    copies = [place for place, run in enumerate(runs) if "bring_back" in graph.operation(run).target]
    distances = []
    for place in copies:
        made = {*graph.operation(runs[place]).outputs}
        following = enumerate(runs[place + 1 :], start=1)
        distances.append(next(far for far, run in following if made & {*graph.operation(run).inputs}))
    assert copies
    assert max(distances) > 1


class Branching(nn.Module):
    """Asks for a value between its blocks, so that it is planned region by region."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 512), nn.Sigmoid(), nn.Linear(512, 64)) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
            if rows.mean().item() > 1e9:
                rows = rows + 1
        return rows.square().mean()


@pytest.mark.slow
def test_a_model_that_asks_for_values_is_planned_in_regions(device: torch.device) -> None:
    torch.manual_seed(0)
    eager, batch = Branching().to(device), torch.randn(1024, 64).to(device)
    planned = copy.deepcopy(eager)
    plan = memfit.plan(planned, batch, budget="smallest", time_limit=2)
    assert plan.regions
    memfit.apply(plan, planned, batch)
    for model in (eager, planned):
        model(batch).backward()
    for one, other in zip(eager.parameters(), planned.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    planned.zero_grad()
    peak = measure_peak(lambda: planned(batch).backward(), resident=[planned, batch])
    assert peak.peak_bytes <= 1.01 * plan.peak_bytes
