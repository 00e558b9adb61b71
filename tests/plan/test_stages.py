"""Which turns stages have, and what can help in them."""

import pytest
from test_solve import residual

from memfit.plan.problem import numbers
from memfit.plan.solve import Planner
from memfit.plan.stages import Stages, Window


@pytest.fixture
def planner() -> Planner:
    return Planner(residual(6).problem())


def stages_of(planner: Planner, parts: int = 3, *, after: int = 0) -> Stages:
    count = len(planner.problem.backward)
    return Stages(planner.links, [count * part // parts for part in range(parts)], Window(count, None, after))


def test_every_turn_is_in_one_stage(planner: Planner) -> None:
    stages = stages_of(planner)
    turns = [turn for stage in range(len(stages)) for turn in stages.turns(stage)]
    assert turns == list(range(len(planner.problem.backward)))


def test_what_a_stage_reads_is_useful_in_it_and_before(planner: Planner) -> None:
    stages = stages_of(planner)
    useful = stages.useful()
    for stage, values in enumerate(useful):
        reads = stages.reads(stages.turns(stage))
        assert reads
        assert all(reads & ~earlier == 0 for earlier in useful[: stage + 1])
        assert stage == 0 or values & ~useful[stage - 1] == 0


def test_what_must_be_there_at_the_end_is_useful_to_the_last(planner: Planner) -> None:
    value = next(numbers(planner.links.values))
    assert stages_of(planner, after=1 << value).useful()[-1] >> value & 1


def test_runs_that_help_make_what_is_useful(planner: Planner) -> None:
    stages = stages_of(planner)
    for stage, useful in enumerate(stages.useful()):
        runnable = stages.runnable(stage, None, None)
        assert runnable == [link for link in planner.links.all if link.makes & useful]


def test_a_horizon_leaves_out_what_is_far_but_for_what_a_schedule_runs(planner: Planner) -> None:
    stages = stages_of(planner, 6)
    everything = {link.own for link in stages.runnable(0, 10**6, None)}
    near = {link.own for link in stages.runnable(0, 0, None)}
    assert near < everything
    start = planner.all_again().expansion
    known = stages.ran(start, 0) & {link.own for link in planner.links.all}
    assert known - near
    assert {link.own for link in stages.runnable(0, 0, start)} == near | known
