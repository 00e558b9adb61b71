"""No file that was damaged is believed, and none raises anything but its refusal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from budgeted import ConvNet, images
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import memfit
from killed.damage import damaged
from memfit._kept_kernels import kept_kernel, place_of
from memfit.capture.kept_graphs import _path, keep_graph, kept_graph
from memfit.errors import InvalidFile
from memfit.files import read_checked, write_checked
from memfit.measure.cost import CostCache, OperatorCost, StepCost
from memfit.measure.process import KnownMemory, OperatorMemory, ProcessCache

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = range(200)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    return tmp_path


def check(path: Path, read: Callable[[], Any], nothing: Any) -> None:
    """Read a file in many states of damage: what was written, or nothing."""
    content, written = path.read_bytes(), read()
    assert written != nothing
    for seed in SEEDS:
        path.write_bytes(damaged(content, seed))
        assert read() in (nothing, written), seed
    path.write_bytes(content)
    assert read() == written


def test_costs(folder: Path) -> None:
    cache = CostCache("cpu")
    cache.save({str(size): OperatorCost(workspace_bytes=size, output_bytes=(size,)) for size in range(50)})
    cache.save_steps({"a": StepCost(fresh_us=1.5, is_equal=True)})
    check(cache.path, lambda: (dict(cache.load()), dict(cache.load_steps())), ({}, {}))


def test_memory_of_processes(folder: Path) -> None:
    cache = ProcessCache()
    found = OperatorMemory(rise_bytes=4096, written_bytes=2, retained_bytes=1, retained_mapped_bytes=4)
    cache.save(KnownMemory(operators={"a": found, "b": found}))
    check(cache.path, cache.load, KnownMemory())


def test_graphs_of_stretches(folder: Path) -> None:
    with torch._subclasses.FakeTensorMode():
        keep_graph("some", make_fx(lambda x: torch.relu(x) + 1)(torch.ones(3)).graph)

        def read() -> str | None:
            found = kept_graph("some")
            return None if found is None else str(found)

        check(_path("some"), read, None)


def test_places_of_kernels(folder: Path) -> None:
    write_checked(place_of("some"), {"code": "code.py", "hash": "0", "kernels": {}})
    check(place_of("some"), lambda: read_checked(place_of("some")), None)
    place_of("some").write_bytes(b"\xff")
    assert kept_kernel(place_of("some")) is None


@pytest.fixture(scope="module")
def plan() -> memfit.Plan:
    return memfit.plan(ConvNet(2), images(2), budget=0.8, time_limit=0.2, progress=False)


def test_plans(plan: memfit.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)

    def read() -> memfit.Plan | None:
        try:
            return memfit.Plan.load(path)
        except InvalidFile:
            return None

    check(path, read, None)


class Wide(nn.Sequential):
    """Enough for its plan and costs to be kept."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))


@pytest.mark.parametrize("seed", range(4))
def test_a_fit_after_damage_to_all_that_was_kept_is_as_it_was(folder: Path, seed: int) -> None:
    def fitted() -> tuple[str, list[torch.Tensor]]:
        torch.manual_seed(0)
        model, batch = Wide(), torch.randn(64, 8)
        memfit.fit(model, batch, 0.9, time_limit=0.2, progress=False)
        model(batch).square().mean().backward()
        plan = memfit.plan_of(model)
        assert plan is not None
        assert plan.budget_bytes is not None
        assert plan.peak_bytes <= plan.budget_bytes
        return plan.program.graph_digest, [each.grad for each in model.parameters()]

    digest, gradients = fitted()
    kept = list(folder.rglob("*.json"))
    assert len(kept) == 2
    for path in kept:
        path.write_bytes(damaged(path.read_bytes(), seed))
    again, others = fitted()
    assert again == digest
    assert all(map(torch.equal, gradients, others))
