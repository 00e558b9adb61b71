import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import _torch, pipeline, remembered, runner
from memfit.measure.peak import measure_peak
from memfit.ops import stretch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a search."""
    done: list[int] = []
    plan = pipeline.StepPlanner.plan

    def counted(self: pipeline.StepPlanner, *arguments: Any) -> Any:
        done.append(1)
        return plan(self, *arguments)

    monkeypatch.setattr(pipeline.StepPlanner, "plan", counted)
    return done


def chain(*, width: int = 64, activation: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(width, width), activation())]
    return nn.Sequential(*layers)


def batch(rows: int = 256) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def fitted(model: nn.Module, sample: torch.Tensor, budget: float | str = 0.9, **options: Any) -> nn.Module:
    return memfit.fit(model, sample, budget, time_limit=1, **options)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(batch()).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.usefixtures("one_thread")
def test_a_later_run_takes_the_plan_and_computes_the_same(searches: list[int]) -> None:
    first = fitted(chain(), batch())
    later = fitted(chain(), batch())
    assert len(searches) == 1
    plan, again = memfit.plan_of(first), memfit.plan_of(later)
    assert plan is not None
    assert again is not None
    assert again.program == plan.program
    assert not plan.is_identity
    assert again.budget_bytes == plan.budget_bytes
    eager = gradients(chain())
    assert all(torch.equal(*pair) for pair in zip(gradients(later), eager, strict=True))
    peak = measure_peak(lambda: later(batch(128)).sum().backward(), resident=[later]).peak_bytes
    assert peak <= (plan.budget_bytes or 0)  # another shape is served under the same budget


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "other",
    [
        {"budget": 0.95},
        {"sample": batch(512)},
        {"model": chain(activation=nn.Tanh)},  # the same parameters, other operations
        {"optimizer": "adamw"},
        {"keep": "0"},
        {"keep": nn.Linear},
    ],
    ids=["budget", "sample", "operations", "optimizer", "name to keep", "type to keep"],
)
def test_what_differs_is_planned_anew(other: dict[str, Any], searches: list[int]) -> None:
    fitted(chain(), batch())
    fitted(**{"model": chain(), "sample": batch()} | other)
    assert len(searches) == 2


@pytest.mark.usefixtures("one_thread")
def test_nothing_is_kept_or_taken_where_that_is_asked_for(folder: Path, searches: list[int]) -> None:
    for _ in range(2):
        memfit.fit(chain(), batch(), 0.9, time_limit=1, remember=False)
    assert len(searches) == 2
    assert not folder.exists()


@pytest.mark.usefixtures("one_thread")
def test_a_damaged_file_is_said_and_replaced(
    folder: Path, searches: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    fitted(chain(), batch())
    (path,) = folder.glob("*/*.json")
    path.write_text(path.read_text()[:100])
    with caplog.at_level(logging.WARNING):
        fitted(chain(), batch())
    assert "is damaged" in caplog.text
    fitted(chain(), batch())
    assert len(searches) == 2


@pytest.mark.usefixtures("one_thread")
def test_a_folder_that_cannot_be_written_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        model = fitted(chain(), batch())
    assert "could not be remembered" in caplog.text
    assert memfit.plan_of(model) is not None


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "optimizer",
    [
        "adam",
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        torch.optim.Adam(chain().parameters(), lr=torch.tensor(0.1)),
    ],
    ids=["named", "made", "with a rate that is a tensor"],
)
def test_any_optimizer_may_be_part_of_the_step(optimizer: Any, searches: list[int]) -> None:
    for _ in range(2):
        fitted(chain(), batch(), optimizer=optimizer)
    assert len(searches) == 1


class Dilated(nn.Module):
    """Another convolution of the same parameters and sizes."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=dilation, dilation=dilation)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(images))).square().mean()


@pytest.mark.usefixtures("one_thread")
def test_constants_of_operators_count(searches: list[int]) -> None:
    for dilation in (1, 2, 1):
        fitted(Dilated(dilation), torch.randn(4, 3, 16, 16), "smallest")
    assert len(searches) == 2


@pytest.fixture
def kept(folder: Path) -> tuple[Path, memfit.Plan]:
    """The file of a plan, and the plan."""
    model = fitted(chain(), batch())
    plan = memfit.plan_of(model)
    assert plan is not None
    (path,) = folder.glob("*/*.json")
    return path, plan


@pytest.mark.usefixtures("one_thread")
def test_only_plans_that_were_finished_and_measured_are_kept(kept: tuple[Path, memfit.Plan], tmp_path: Path) -> None:
    _, plan = kept
    for other in (
        dataclasses.replace(plan, log=("1.0 s: interrupted",)),
        dataclasses.replace(plan, times_measured=False),
    ):
        remembered.keep_plan(tmp_path / "other.json", other)
        assert not (tmp_path / "other.json").exists()
    remembered.keep_plan(tmp_path / "other.json", plan)
    assert (tmp_path / "other.json").exists()


@pytest.mark.usefixtures("one_thread")
def test_a_file_that_may_not_be_looked_at_is_said(
    monkeypatch: pytest.MonkeyPatch, searches: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError("not yours")

    fitted(chain(), batch())
    monkeypatch.setattr(Path, "read_text", refuse)
    fitted(chain(), batch())
    monkeypatch.undo()
    assert "not yours" in caplog.text
    assert len(searches) == 2


@pytest.mark.usefixtures("one_thread")
def test_a_plan_is_not_kept_where_its_kernels_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(stretch, "_STRETCHES", {})
    monkeypatch.setattr(_torch, "compile_graph", refuse)
    monkeypatch.setattr("memfit.ops.stretch.kept_kernel", lambda _: None)
    model = chain(activation=nn.SiLU, width=256)
    fitted(model, torch.randn(256, 256), "smallest", kernels="inductor")
    kept = [memfit.Plan.load(path) for path in folder.glob("*/*.json")]
    assert not any("inductor" in plan.allow for plan in kept)


@pytest.mark.usefixtures("one_thread")
def test_plans_in_other_layouts_are_found_beside_each_other(folder: Path, searches: list[int]) -> None:
    fitted(chain(), batch())
    (path,) = folder.glob("*/*.json")
    other = dataclasses.replace(memfit.Plan.load(path), allow=("recompute",))
    other.save(path.with_name("0.json"))  # of another graph, and newer
    kept = remembered.kept_plans(path.parent)
    assert [plan.allow for plan in kept.values()] == [("recompute",), ("recompute", "lean")]
    fitted(chain(), batch())
    assert len(searches) == 1


@pytest.mark.usefixtures("one_thread")
def test_a_model_that_cannot_be_captured_as_it_was_is_planned_anew(
    monkeypatch: pytest.MonkeyPatch, searches: list[int]
) -> None:
    fitted(chain(), batch())
    trace = runner.traced_for
    calls: list[int] = []

    def refuse_once(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise memfit.CaptureError("not in this layout")
        return trace(*arguments, **options)

    monkeypatch.setattr(runner, "traced_for", refuse_once)
    assert memfit.plan_of(fitted(chain(), batch())) is not None
    assert len(searches) == 2
