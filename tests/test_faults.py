"""Failures inside of memfit, at every stage of every verb: a sentence, and everything as it was."""

import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from budgeted import state_of
from torch import nn

import memfit
from memfit import layout, pipeline, prepare, remembered, runner
from memfit.capture import eager_step, journal, lower, reachable, sample, trace
from memfit.errors import InternalError, MemfitError
from memfit.execute import attach, codegen, compiled, timed_step
from memfit.measure import cost, optimizer, probe
from memfit.plan import expand, problem, simulate, solve, staged
from memfit.prove import eager as prove_eager

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, Any] = {"time_limit": 0.1, "progress": False}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = ((nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3))
        self.layers = nn.Sequential(*(nn.Sequential(*each) for each in parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Looking(Net):
    """Cannot be captured whole: it looks at values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layers(x)
        if float(found.detach().sum()) > 1e9:
            found = found * 2
        return found.square().mean()


def train(model: nn.Module) -> None:
    model(BATCH).backward()


def step_with_budget(model: nn.Module) -> None:
    memfit.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda net, x: net(x), budget=2**20, **OPTIONS)(
        BATCH
    )


VERBS: dict[str, Callable[[nn.Module, memfit.Plan], Any]] = {
    "fit": lambda model, _: train(memfit.fit(model, BATCH, 0.7, remember=False, **OPTIONS)),
    "fit again": lambda model, _: train(memfit.fit(model, BATCH, 0.7, **OPTIONS)),
    "plan": lambda model, _: memfit.plan(model, BATCH, budget=0.7, **OPTIONS),
    "estimate": lambda model, _: memfit.estimate(model, BATCH, progress=False),
    "frontier": lambda model, _: memfit.frontier(model, BATCH, fractions=(0.6,), time_limit=0.2, progress=False),
    "apply": lambda model, plan: train(memfit.apply(plan, model, BATCH)),
    "check": lambda model, plan: memfit.check(model, plan, BATCH),
    "profile": lambda model, plan: memfit.profile(model, plan, BATCH, pairs=1),
    "Step": lambda model, _: step_with_budget(model),
}
STAGES: list[Any] = [
    # capture
    sample.check_sample,
    reachable.Reachable.__init__,
    trace._export_once,
    eager_step._backward,
    journal.Journal._name_of_call,
    lower.lower,
    prepare.traced_for,
    # measure
    optimizer.check_optimizer,
    cost.CostCache.load,
    probe.device_name,
    timed_step.TimedStep.__init__,
    # plan
    layout.with_layout,
    remembered.folder_of,
    prepare.prepare,
    pipeline.make_planner,
    problem._decided,
    solve.Planner.solve,
    staged.StagedProgram.__init__,
    expand.program_of,
    simulate.simulate,
    prepare.Prepared.captured_step,
    # execute
    runner.check_equal_to_eager,
    codegen.generate,
    compiled.CompiledCall.__call__,
    attach.kind_of_call,
    prove_eager.EagerComparison.run,
]
ERRORS = ("AssertionError", "RuntimeError", "KeyError")
IN_CALLS = (compiled.CompiledCall.__call__, attach.kind_of_call)  # where others are those of operators, as in eager


def error_for(number: int, function: Any) -> str:
    return "AssertionError" if function in IN_CALLS else ERRORS[number % len(ERRORS)]


def broken(function: types.FunctionType, error: str) -> types.CodeType:
    """Code for a function that fails, as if its own did."""
    scope: dict[str, Any] = {}
    exec(compile(f"def fail(*args, **kwargs): raise {error}('injected')", function.__code__.co_filename, "exec"), scope)
    code: types.CodeType = scope["fail"].__code__
    return code.replace(co_freevars=function.__code__.co_freevars, co_name=function.__code__.co_name)


def everything_of(model: nn.Module) -> list[Any]:
    """All that a failure must leave as it was, beside numbers."""
    modules = list(model.modules())
    return [
        [sorted(vars(each)) for each in modules],
        [(type(each), each.training, len(each._forward_hooks), len(each._forward_pre_hooks)) for each in modules],
        [(each.grad is None, bool(each._backward_hooks)) for each in model.parameters()],
        random.getstate(),
        torch.is_grad_enabled(),
        [torch.manual_seed, torch.set_rng_state, nn.Module.__call__, open],
        len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
    ]


def made(kind: type[Net]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.fixture(scope="module")
def plan() -> memfit.Plan:
    return memfit.plan(made(Net), BATCH, budget=0.7, **OPTIONS)


def check(verb: str, function: Any, error: str, kind: type[Net], plan: memfit.Plan) -> str:
    """Return what a verb raised, "" if it did without; all must be as it was, and the verb work afterwards."""
    model = made(kind)
    everything, numbers = everything_of(model), state_of(model)
    whole, said = function.__code__, ""
    function.__code__ = broken(function, error)
    try:
        VERBS[verb](model, plan)
    except MemfitError as found:
        said = str(found)
    finally:
        function.__code__ = whole
    if "running a captured call" in said:
        memfit.remove(model)  # as it says
    if said:
        assert everything_of(model) == everything
        assert all(map(torch.equal, state_of(model), numbers))
        VERBS[verb](model, plan)
    return said


FIRST = [  # reached by that verb, and by all that it falls back to
    ("fit", sample.check_sample),
    ("fit", prepare.traced_for),
    ("fit", attach.kind_of_call),
    ("plan", layout.with_layout),
    ("plan", solve.Planner.solve),
    ("plan", optimizer.check_optimizer),
    ("apply", codegen.generate),
    ("apply", compiled.CompiledCall.__call__),
    ("check", prove_eager.EagerComparison.run),
    ("profile", trace._export_once),
    ("Step", trace._export_once),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(FIRST)), ids=[f"{verb}-{each.__qualname__}" for verb, each in FIRST])
def test_a_failure_inside_is_told_in_a_sentence(number: int, plan: memfit.Plan) -> None:
    verb, function = FIRST[number]
    said = check(verb, function, error_for(number, function), Net, plan)
    assert "injected" in said


def test_where_a_device_is_asked_for_nothing_is_raised() -> None:
    """An error there would end the process: an estimate does without that stage."""
    assert not check("estimate", journal.Journal._name_of_call, "RuntimeError", Net, None)  # type: ignore[arg-type]


def test_code_of_the_model_is_told_as_it_is() -> None:
    class Failing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * {}["missing"]  # type: ignore[index]

    for verb in ("fit", "plan"):
        with pytest.raises((KeyError, memfit.CaptureError), match="missing") as raised:
            VERBS[verb](Failing(), None)  # type: ignore[arg-type]
        assert not isinstance(raised.value, InternalError)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Net, Looking])
@pytest.mark.parametrize("verb", VERBS)
def test_every_stage_of_every_verb(verb: str, kind: type[Net]) -> None:
    plan = memfit.plan(made(kind), BATCH, budget=0.7 if kind is Net else "smallest", **OPTIONS)
    for number, function in enumerate(STAGES):
        check(verb, function, error_for(number, function), kind, plan)
