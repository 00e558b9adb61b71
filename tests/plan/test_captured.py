import dataclasses
import json
import math

import pytest
from handmade import graphs
from handmade_plan import captured, chain, plan_of, program_dropping
from hypothesis import given

from memfit.errors import InvalidFile
from memfit.ir import OptimizerMemory
from memfit.plan.captured import CapturedStep
from memfit.plan.plan import Plan
from memfit.plan.problem import Costs, handed_out_together


def read_again(step):
    return CapturedStep.from_data(json.loads(json.dumps(step.to_data(), allow_nan=False)))


@given(graphs())
def test_a_step_is_the_same_after_a_round_trip(graph):
    count = len(graph.operations) + len(graph.alternatives)
    costs = Costs(time_us=[1.25] * count, in_place_us=[math.inf] * count, workspace_bytes=[7] * count)
    step = CapturedStep.of(
        eager=graph,
        eager_workspace_bytes=[3] * count,
        graph=handed_out_together(graph),
        costs=costs,
        optimizer=OptimizerMemory(state_bytes=5, workspace_bytes=6, changes_bytes=(-1, 7, -6)),
        granularity_bytes=512,
    )
    assert step.rewritten is None
    assert read_again(step) == step
    assert step.graph.digest() == handed_out_together(graph).digest()


def test_a_graph_that_was_rewritten_is_carried_too():
    case, other = chain("a", "b"), chain("a", "b", "c")
    step = dataclasses.replace(captured(case), rewritten=None)
    with_both = CapturedStep.of(
        eager=other.graph,
        eager_workspace_bytes=other.costs.workspace_bytes,
        graph=case.graph,
        costs=case.costs,
        optimizer=step.optimizer,
        granularity_bytes=1,
    )
    assert with_both.rewritten is not None
    assert read_again(with_both).graph.digest() == case.graph.digest()


def carrying():
    case = chain("a", "b", "c", "d")
    return plan_of(case, program_dropping(case, "b"), step=captured(case))


def test_a_plan_carries_its_step_through_a_file_and_says_so_by_its_version(tmp_path):
    plan = carrying()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert json.loads(plan.to_json())["version"] == 3
    assert json.loads(dataclasses.replace(plan, step=None).to_json())["version"] == 1


def test_a_region_carries_its_step_too():
    whole = dataclasses.replace(carrying(), step=None, regions={"block": carrying()})
    assert json.loads(whole.to_json())["version"] == 3
    assert Plan.from_json(whole.to_json()) == whole


@pytest.mark.parametrize(
    "damage",
    [
        {"eager": None},
        {"workspace_bytes": [1]},
        {"workspace_bytes": "many"},
        {"time_us": [-1.0] * 8},
        {"granularity_bytes": 0},
        {"optimizer": {"state_bytes": True, "workspace_bytes": 0}},
        {"optimizer": {"state_bytes": 1, "workspace_bytes": 0, "changes_bytes": [0.5]}},
        {"optimizer": {"unheard_of": 3}},
    ],
)
def test_a_damaged_step_is_refused(damage):
    with pytest.raises((InvalidFile, KeyError, TypeError, ValueError)):
        CapturedStep.from_data(captured(chain("a", "b", "c", "d")).to_data() | damage)


@pytest.mark.parametrize("column", ["name", "size_bytes", "kind", "module", "dtype"])
def test_a_damaged_column_is_refused(column):
    data = captured(chain("a", "b")).to_data()
    data["eager"]["storages"][column][0] = -7
    with pytest.raises((InvalidFile, TypeError, ValueError)):
        CapturedStep.from_data(data)
