"""Stretches that are not measured: which, and what they are said to take."""

import itertools
from typing import Any

import pytest
import torch
from torch import fx, nn

import memfit
from memfit import _torch, prepare
from memfit.capture.fuse import alternatives_in, fuse
from memfit.capture.lower import lower
from memfit.capture.sample import Sample
from memfit.capture.trace import traced
from memfit.execute import timing
from memfit.execute.timing import operation_times
from memfit.ir import Compute, Operation
from memfit.measure.cost import OperatorCost
from memfit.measure.probe import measured_costs
from memfit.ops import stretch as stretch_module
from memfit.ops.likeness import Likenesses, likenesses, moved_bytes
from memfit.ops.registry import find_function, name_of
from memfit.ops.stretch import Stretch, stretch_of

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretch_module, "_STRETCHES", {})


def scaled(rows: int, operator: Any = aten.relu.default, *, turned: bool = False) -> Stretch:
    """operator(x * 2) of a matrix."""
    with _torch.FakeTensorMode():
        value = torch.empty(64, rows).t() if turned else torch.empty(rows, 64)
        graph = fx.Graph()
        given = graph.placeholder("given")
        product = graph.call_function(aten.mul.Tensor, (given, 2.0))
        made = graph.call_function(operator, (product,))
        graph.output([made])
        for node in (given, product, made):
            node.meta["val"] = value
    return stretch_of(graph)


def summed(rows: int, dimension: int) -> Stretch:
    with _torch.FakeTensorMode():
        graph = fx.Graph()
        given = graph.placeholder("given")
        given.meta["val"] = torch.empty(rows, 64)
        made = graph.call_function(aten.sum.dim_IntList, (given, [dimension]))
        made.meta["val"] = torch.empty(64 if dimension == 0 else rows)
        graph.output([made])
    return stretch_of(graph)


def test_the_biggest_is_measured() -> None:
    sizes = {rows: scaled(rows) for rows in (512, 1024, 2048)}
    assert likenesses(sizes.values()) == {sizes[rows]: sizes[2048] for rows in (512, 1024)}
    assert moved_bytes(sizes[1024]) == 2 * 1024 * 64 * 4


def test_other_operators_and_layouts_are_other_families() -> None:
    kinds = [scaled(512), scaled(512, aten.sigmoid.default), scaled(512, turned=True)]
    assert likenesses(kinds) == {}


def test_sums_along_other_dimensions_are_other_families() -> None:
    assert likenesses([summed(rows, 0) for rows in (64, 128, 512)])
    assert likenesses([summed(64, 0), summed(128, 1)]) == {}


class Narrowing(nn.Module):
    """The same operators on ever fewer columns."""

    def __init__(self) -> None:
        super().__init__()
        widths = range(256, 200, -8)
        self.parts = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            states = torch.nn.functional.silu(part(states) * 2)
        return states.square().mean()


@pytest.mark.usefixtures("one_thread", "_no_compiler")
def test_those_left_out_are_not_run_and_get_a_time() -> None:
    model, sample = Narrowing(), Sample.of(torch.randn(1024, 256))
    with traced(model, sample) as joint:
        fuse(joint)
        like = likenesses(alternatives_in(joint.graph_module.graph))
        assert like
        graph = lower(joint)
        times = operation_times(joint.graph_module, graph, model, sample, steps=2, like=like)
    assert not any(stretch.is_ready for stretch in like)
    makers = {index: each for each in graph.operations for index in each.outputs}

    def longer(alternative: Operation) -> float:
        return times.fresh_us[alternative.name] / times.fresh_us[makers[alternative.outputs[0]].name]

    found = {find_function(each.target): longer(each) for each in graph.alternatives}
    assert all(found[stretch] == pytest.approx(found[biggest]) for stretch, biggest in like.items())


WORKSPACE = 2**16


@pytest.fixture
def _greedy_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled after the search seemed to be for nothing, and takes more memory than anybody guessed."""

    def measured(signatures: Any, *, device: str, timed: bool = False, **_: Any) -> dict[str, OperatorCost]:
        if timed:
            return measured_costs(signatures, device=device, timed=True)
        return {each: OperatorCost(workspace_bytes=WORKSPACE, output_bytes=()) for each in signatures}

    monkeypatch.setattr(prepare, "measured_costs", measured)
    monkeypatch.setattr(timing._Typical, "_like_others_us", lambda *_: 0.01)


@pytest.fixture
def put_off(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the stretches that were not measured before the search."""
    names: set[str] = set()
    choose = prepare._put_off

    def noted(graph: fx.Graph) -> Likenesses:
        like = choose(graph)
        names.update(map(name_of, like))
        return like

    monkeypatch.setattr(prepare, "_put_off", noted)
    return names


@pytest.mark.usefixtures("one_thread", "_no_compiler", "_greedy_stretches")
def test_what_a_plan_runs_is_measured_wherever_it_stands(put_off: set[str]) -> None:
    model, batch = Narrowing(), torch.randn(1024, 256)
    curve = memfit.frontier(model, batch, fractions=(0.6, 0.5), kernels="inductor", time_limit=6)
    found = 0
    for plan in curve.plans:
        assert plan.step is not None
        assert plan.peak_bytes <= (plan.budget_bytes or 0)
        graph = plan.step.graph
        runs = [each.operation for each in (*plan.program.forward, *plan.program.backward) if isinstance(each, Compute)]
        guessed = {graph.operation(run).target for run in runs} & put_off
        places = [place for place in range(len(plan.step.workspace_bytes)) if graph.operation(place).target in guessed]
        assert all(plan.step.workspace_bytes[place] >= WORKSPACE for place in places)
        found += len(guessed)
    assert found


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches run operator by operator: what they compute and when they are called is the same."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(_torch, "compile_graph", refuse)
    monkeypatch.setattr("memfit.ops.stretch.kept_kernel", lambda _: None)
