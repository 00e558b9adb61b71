"""A plan made by hand of a graph made by hand, without a model."""

import dataclasses
import itertools
from typing import Any

from handmade import KIB, Case, Layer, Step, training

from memfit.ir import Graph, OptimizerMemory, Program
from memfit.plan.captured import CapturedStep
from memfit.plan.choice import everything_kept
from memfit.plan.expand import Expander, program_of
from memfit.plan.plan import Plan, fates_of

SIZE = 100 * KIB


def chain(*names: str) -> Case:
    """Layers one after the other, each saving what it reads, each in a module of its name."""
    values = ["x", *names]
    layers = [
        Layer(Step(after, reads=before, makes=after, time_us=10.0), saves=before)
        for before, after in itertools.pairwise(values)
    ]
    case = training(dict.fromkeys(names, SIZE), layers)
    return dataclasses.replace(case, graph=_in_modules(case.graph))


def _in_modules(graph: Graph) -> Graph:
    """Values and operations are in the module they are named for."""
    return dataclasses.replace(
        graph,
        storages=tuple(dataclasses.replace(each, module=each.name) for each in graph.storages),
        operations=tuple(
            dataclasses.replace(each, module=each.name.removeprefix("back_")) for each in graph.operations
        ),
    )


def program_dropping(case: Case, *names: str) -> Program:
    """Keep everything but these values from the forward pass."""
    problem = case.problem()
    dropped = case.value(*names)
    wanted = [values & ~dropped for values in everything_kept(problem)]
    return program_of(problem, Expander(problem).expand(wanted))


def plan_of(case: Case, program: Program, **changes: Any) -> Plan:
    """A plan with round numbers."""
    fields: dict[str, Any] = {
        "model": "Net",
        "model_digest": "0123456789abcdef",
        "sample": "x: float32[4, 4]",
        "torch_version": "2.13.0",
        "device": "cpu",
        "optimizer": "adamw",
        "allow": ("recompute", "lean"),
        "rewrites": (),
        "outputs": "all",
        "backward_from": "auto",
        "budget_bytes": 600 * KIB,
        "peak_bytes": 580 * KIB,
        "unplanned_peak_bytes": 1000 * KIB,
        "persistent_bytes": 200 * KIB,
        "optimizer_state_bytes": 20 * KIB,
        "floor_bytes": 400 * KIB,
        "floor_operation": "test.back_b in b",
        "step_us": 1000.0,
        "extra_us": 50.0,
        "bound_us": 40.0,
        "times_measured": True,
        "plan_seconds": 1.5,
        "log": ("0.0 s: greedy: 5.00% slower",),
        "fates": fates_of(case.graph, program),
        "program": program,
    }
    return Plan(**fields | changes)


def captured(case: Case) -> CapturedStep:
    """What a plan of a case carries along."""
    return CapturedStep.of(
        eager=case.graph,
        eager_workspace_bytes=case.costs.workspace_bytes,
        graph=case.graph,
        costs=case.costs,
        optimizer=OptimizerMemory(state_bytes=20 * KIB, workspace_bytes=KIB),
        granularity_bytes=1,
    )


def make_plan(*dropped: str, **changes: Any) -> Plan:
    """A plan of four layers that computes some values again."""
    case = chain("a", "b", "c", "d")
    return plan_of(case, program_dropping(case, *dropped), **changes)
