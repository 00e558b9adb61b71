"""A plan that carries its step, made by hand: a chain of modules of which some are computed again."""

import dataclasses
import functools
from typing import Any

from handmade_estimate import KIB, chain
from handmade_reports import make_plan

from memfit.ir import Graph, OptimizerMemory, Program
from memfit.plan.captured import CapturedStep
from memfit.plan.expand import Expander, program_of
from memfit.plan.greedy import everything_kept
from memfit.plan.identity import identity_program
from memfit.plan.plan import Plan, fates_of
from memfit.plan.problem import Costs, Problem
from memfit.plan.simulate import simulate

STAGES = [f"stage{number}" for number in range(1, 7)]


def plan_of_chain(
    modules: list[str], *, dropped: tuple[int, ...] = (1, 3), state_bytes: int = 3 * KIB, **changes: Any
) -> Plan:
    """A plan that computes the values of the modules at `dropped` again."""
    graph = chain(modules)
    count = len(graph.operations)
    costs = Costs(time_us=[10.0] * count, in_place_us=[10.0] * count, workspace_bytes=[64] * count)
    problem = Problem(graph, costs)
    taken = sum(problem.bit[1 + len(modules) + number] for number in dropped)
    expansion = Expander(problem).expand([values & ~taken for values in everything_kept(problem)])
    program = program_of(problem, expansion)
    optimizer = OptimizerMemory(state_bytes=state_bytes, workspace_bytes=KIB if state_bytes else 0)
    step = CapturedStep.of(
        eager=graph,
        eager_workspace_bytes=costs.workspace_bytes,
        graph=graph,
        costs=costs,
        optimizer=optimizer,
        granularity_bytes=1,
    )
    fields = {
        "peak_bytes": _peak_bytes(graph, program, step),
        "unplanned_peak_bytes": _peak_bytes(graph, identity_program(graph), step),
        "budget_bytes": _peak_bytes(graph, program, step) + 512,
        "step_us": 10.0 * count,
        "extra_us": expansion.extra_us,
        "bound_us": 10.0,
        "fates": fates_of(graph, program),
        "program": program,
        "step": step,
    }
    return make_plan(**fields | changes)


@functools.cache
def long_plan() -> Plan:
    """A plan of 8000 operations and a thousand that run again."""
    return plan_of_chain([f"layers.{number}" for number in range(4000)], dropped=tuple(range(20, 3000, 3)))


def without_step(plan: Plan) -> Plan:
    """As an old memfit wrote it."""
    return dataclasses.replace(plan, step=None)


def _peak_bytes(graph: Graph, program: Program, step: CapturedStep) -> int:
    return simulate(
        graph, program, workspace_bytes=step.workspace_bytes, optimizer=step.optimizer, granularity_bytes=1
    ).peak_bytes
