import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.errors import InfeasibleBudget
from memfit.ops.stretch import PREFIX
from memfit.recipe import EXACT, Recipe, with_kernels
from memfit.ways import best_way

ALL = with_kernels(EXACT, "inductor")
OWN_LAYOUT = (*EXACT, "inductor")


@dataclasses.dataclass
class FakePlan:
    slowdown: float
    peak_bytes: int = 100
    times_measured: bool = True
    was_interrupted: bool = False
    allow: tuple[str, ...] = ()
    seconds: float | None = None  # of its steps
    compiled: float = 0.5  # of the unplanned step's time
    step_us: float = 100.0

    @property
    def step(self) -> Any:
        own, stretch = (SimpleNamespace(target=target) for target in ("aten.mm", f"{PREFIX}:one"))
        return SimpleNamespace(
            graph=SimpleNamespace(operations=[own, stretch] if self.compiled else [own]),
            time_us=[(1 - self.compiled) * self.step_us, 1.0],
        )


def interrupted(_plans: Any) -> Any:
    raise KeyboardInterrupt


def seconds_of(plans: Sequence[Any]) -> list[float] | None:
    return None if None in [plan.seconds for plan in plans] else [plan.seconds for plan in plans]


def tried(plans: dict[tuple[str, ...], Any], recipe: Recipe) -> tuple[Any, list[tuple[str, ...]]]:
    """The plan that is taken, and what was allowed in each way that was tried."""
    asked: list[tuple[str, ...]] = []

    def make(way: Recipe) -> Any:
        asked.append(way.allow)
        made = plans[way.allow]
        if isinstance(made, BaseException):
            raise made
        return dataclasses.replace(made, allow=way.allow)

    return best_way(recipe, make, lambda plan: plan, seconds_of), asked


def recipe(allow: tuple[str, ...] = OWN_LAYOUT, budget: Any = 1000) -> Recipe:
    return Recipe(budget=budget, allow=allow)


def test_a_compiled_plan_that_is_as_fast_as_eager_is_taken_at_once():
    taken, asked = tried({OWN_LAYOUT: FakePlan(0.01)}, recipe())
    assert asked == [OWN_LAYOUT]
    assert taken.allow == OWN_LAYOUT


@pytest.mark.parametrize(("eager", "expected"), [(0.05, EXACT), (0.15, OWN_LAYOUT)])
def test_the_faster_of_two_is_taken_where_the_compiled_one_is_slow(eager, expected):
    taken, asked = tried({OWN_LAYOUT: FakePlan(0.10), EXACT: FakePlan(eager)}, recipe())
    assert asked == [OWN_LAYOUT, EXACT]
    assert taken.allow == expected


@pytest.mark.parametrize(
    ("compiled", "eager", "expected"),
    [
        pytest.param(FakePlan(0.10, seconds=1.0), FakePlan(0.02, seconds=1.2), OWN_LAYOUT, id="predictions are close"),
        pytest.param(FakePlan(0.30, seconds=1.0), FakePlan(0.02, seconds=1.2), EXACT, id="predictions are clear"),
        pytest.param(
            FakePlan(0.10, seconds=1.0, compiled=0.01),
            FakePlan(0.02, seconds=1.2, compiled=0.0),
            EXACT,
            id="little is compiled",
        ),
        pytest.param(FakePlan(0.10), FakePlan(0.02, seconds=1.2), EXACT, id="no steps can be run"),
        pytest.param(
            FakePlan(0.10, seconds=1.0), FakePlan(0.02, seconds=1.2, times_measured=False), EXACT, id="one is estimated"
        ),
    ],
)
def test_steps_decide_where_predictions_may_be_the_wrong_way_round(compiled, eager, expected):
    taken, _ = tried({OWN_LAYOUT: compiled, EXACT: eager}, recipe())
    assert taken.allow == expected


@pytest.mark.parametrize("changed", [{"was_interrupted": True}, {"step_us": 6e6}])
def test_no_steps_are_run_that_would_keep_somebody_waiting(changed):
    quick = {"seconds": 1.0, "step_us": 4e6}
    plans = {OWN_LAYOUT: FakePlan(0.10, **quick), EXACT: FakePlan(0.02, seconds=1.2, step_us=4e6)}
    assert tried(plans, recipe())[0].allow == OWN_LAYOUT
    plans[EXACT] = dataclasses.replace(plans[EXACT], **changed)
    assert tried(plans, recipe())[0].allow == EXACT


def test_ctrl_c_while_steps_run_leaves_the_plans():
    plans = {OWN_LAYOUT: FakePlan(0.10), EXACT: FakePlan(0.02)}
    taken = best_way(
        recipe(), lambda way: dataclasses.replace(plans[way.allow], allow=way.allow), lambda plan: plan, interrupted
    )
    assert taken.allow == EXACT


def test_the_lower_of_two_is_taken_where_the_smallest_is_asked_for():
    plans = {OWN_LAYOUT: FakePlan(-0.10, peak_bytes=90), EXACT: FakePlan(0.5, peak_bytes=80)}
    taken, _ = tried(plans, recipe(budget="smallest"))
    assert taken.allow == EXACT


def test_other_layouts_and_eager_kernels_are_tried_where_there_is_no_plan():
    none = InfeasibleBudget("none", smallest_bytes=2000)
    taken, asked = tried({ALL: none, OWN_LAYOUT: none, EXACT: FakePlan(0.4)}, recipe(ALL))
    assert asked == [ALL, OWN_LAYOUT, EXACT]
    assert taken.allow == EXACT
    taken, asked = tried({ALL: none, OWN_LAYOUT: FakePlan(-0.1)}, recipe(ALL))
    assert asked == [ALL, OWN_LAYOUT]


def test_a_slow_plan_with_channels_last_is_compared_with_eager_kernels_alone():
    taken, asked = tried({ALL: FakePlan(0.1), EXACT: FakePlan(0.2)}, recipe(ALL))
    assert asked == [ALL, EXACT]
    assert taken.allow == ALL


def test_where_nothing_fits_the_smallest_of_all_ways_is_said():
    plans = {OWN_LAYOUT: InfeasibleBudget("3 B", smallest_bytes=3), EXACT: InfeasibleBudget("2 B", smallest_bytes=2)}
    with pytest.raises(InfeasibleBudget, match="2 B"):
        tried(plans, recipe())


@pytest.mark.parametrize("plan", [FakePlan(0.5, times_measured=False), FakePlan(0.5, was_interrupted=True)])
def test_guessed_times_and_interrupted_searches_lead_nowhere_else(plan):
    assert tried({OWN_LAYOUT: plan}, recipe())[1] == [OWN_LAYOUT]


def test_without_compiled_kernels_there_is_one_way():
    assert tried({EXACT: FakePlan(0.5)}, recipe(EXACT))[1] == [EXACT]
    by_hand = Recipe(allow=OWN_LAYOUT, recompute=(2,))
    assert tried({OWN_LAYOUT: FakePlan(0.5)}, by_hand)[1] == [OWN_LAYOUT]


def test_ctrl_c_in_a_second_way_leaves_the_plan_of_the_first():
    taken, asked = tried({OWN_LAYOUT: FakePlan(0.5), EXACT: KeyboardInterrupt()}, recipe())
    assert asked == [OWN_LAYOUT, EXACT]
    assert taken.allow == OWN_LAYOUT
    with pytest.raises(KeyboardInterrupt):
        tried({OWN_LAYOUT: KeyboardInterrupt()}, recipe())
